//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("A webhook", func() {
	It("receives what is sent, signed, and follows every change", func() {
		shop := newTenant("shop")
		shop.secret("crm", "secret", "s3cret", "token", "Bearer abc")
		sink := shop.newSink("crm", "s3cret")
		shop.destination("crm", sink.url(), "")
		shop.waitReady("psrc/web", "whd/crm")

		By("sending a call through the Service")
		Expect(shop.send("First")).To(ContainSubstring(`"success":true`))
		sink.eventually("First")
		shop.eventually("whd/crm", "Delivering", "True/Delivering")
		shop.eventually("psrc/web", "Receiving", "True/Receiving")
		Expect(shop.field("psrc/web", "{.status.destinations}")).To(Equal(`["crm"]`))
	})
})
