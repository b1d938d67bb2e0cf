package controllers

import (
	"net"
	"net/http"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/posthorn/posthorn/test/metrics"
)

var _ = Describe("The operator's metrics", func() {
	It("are exactly those in docs/metrics.md", func() {
		free, err := net.Listen("tcp", "127.0.0.1:0")
		Expect(err).NotTo(HaveOccurred())
		address := free.Addr().String()
		Expect(free.Close()).To(Succeed())
		w := newWorld(func(w *world) { w.options.MetricsBindAddress = address })
		namespace := w.newNamespace()
		w.apply(namespace, webSource+crmSecret+crmDestination)
		w.expectCondition(namespace, "whd/crm", "Ready", isTrue, "Ready")

		scrape, err := http.Get("http://" + address + "/metrics")
		Expect(err).NotTo(HaveOccurred())
		defer scrape.Body.Close()
		differences, err := metrics.Differences("Operator", scrape.Body)
		Expect(err).NotTo(HaveOccurred())
		Expect(differences).To(BeEmpty())
	})
})
