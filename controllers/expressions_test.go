package controllers

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

var _ = Describe("The budget of filter expressions", func() {
	It("counts the objects that were accepted before a restart, and then the oldest", func() {
		all := compile.AllExpressions
		DeferCleanup(func() { compile.AllExpressions = all }) // After the operator has stopped.
		compile.AllExpressions.Instructions = 400
		w := newWorld()
		filtered := func(name string) string {
			return crmSecret + named(name, "  sourceRefs:", "  filter: {expression: \"call.a.matches('a{200}')\"}\n  sourceRefs:")
		}
		accepted, later := []string{w.newNamespace(), w.newNamespace()}, []string{}
		for _, namespace := range accepted {
			w.apply(namespace, filtered("first"))
			w.expectCondition(namespace, "whd/first", "Accepted", isTrue, "Accepted")
		}

		w.stop()
		for _, namespace := range accepted { // A namespace with a live config is compiled first.
			Expect(cluster.Delete(w.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: release,
				Name: liveconfig.SecretName(namespace)}})).To(Succeed())
		}
		for range 10 { // One of them is compiled before those that were accepted.
			later = append(later, w.newNamespace())
			w.apply(later[len(later)-1], filtered("later"))
			if len(later) == 1 {
				time.Sleep(1100 * time.Millisecond) // Times of creation have a resolution of a second.
			}
		}
		w.start()
		for _, namespace := range later {
			w.expectCondition(namespace, "whd/later", "Accepted", isFalse, "ExpressionBudget")
		}
		for _, namespace := range accepted {
			w.expectCondition(namespace, "whd/first", "Accepted", isTrue, "Accepted")
		}
		d := w.destination(Default, later[0], "later")
		Expect(meta.FindStatusCondition(d.Status.Conditions, "Accepted").Message).To(Equal("spec.filter.expression: 4 nodes, and patterns with 200 instructions; with them, the expressions of all namespaces would be above 200000 nodes or 400 instructions; remove or shorten expressions, or filter by types and events"))

		By("deleting one that was accepted")
		w.delete(accepted[0], "whd", "first")
		w.expectCondition(later[0], "whd/later", "Accepted", isTrue, "Accepted")
		for _, namespace := range later[1:] {
			w.expectCondition(namespace, "whd/later", "Accepted", isFalse, "ExpressionBudget")
		}
	})
})
