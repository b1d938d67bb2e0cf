// Package e2e tests Posthorn on a real cluster with the tools of its users: helm, kubectl
// and the posthorn image. hack/e2e starts it.
//
// Specs that do not change the release run in parallel, each in its own namespaces. Specs
// that break or replace the release are Serial and run after them.
package e2e
