package controllers

import (
	"context"
	"net/http"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/test/metrics"
	"github.com/posthorn/posthorn/test/process"
)

var _ = Describe("The operator's metrics", func() {
	It("are exactly those in docs/metrics.md", func() {
		address := process.FreeAddr()
		gone := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: backlogSecret},
			StringData: map[string]string{"dispatcher-9": "3"}}
		Expect(cluster.Create(context.Background(), gone)).To(Succeed())
		w := newWorld(func(w *world) { w.options.MetricsBindAddress = address })
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		Eventually(func() int { return testutil.CollectAndCount(orphanedPending) }).Should(Equal(1))

		scrape, err := http.Get("http://" + address + "/metrics")
		Expect(err).NotTo(HaveOccurred())
		defer scrape.Body.Close()
		differences, err := metrics.Differences("Operator", scrape.Body)
		Expect(err).NotTo(HaveOccurred())
		Expect(differences).To(BeEmpty())
	})
})
