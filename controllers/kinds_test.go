package controllers

import (
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// Suppression is a sixth kind: it rejects the calls of a user. Its entry in the live config,
// and its report, are the same as for a DeletionRequest whose run has ended.
type Suppression struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec struct {
		UserID                  string `json:"userID,omitempty"`
		TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
	} `json:"spec,omitempty"`
	Status SuppressionStatus `json:"status,omitempty"`
}

type SuppressionStatus struct {
	v1beta1.JobStatus `json:",inline"`
}

// DeepCopyObject implements runtime.Object.
func (o *Suppression) DeepCopyObject() runtime.Object {
	out := *o
	o.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	o.Status.JobStatus.DeepCopyInto(&out.Status.JobStatus)
	return &out
}

// SuppressionList is a list of Suppressions.
type SuppressionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Suppression `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *SuppressionList) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = slices.Clone(l.Items)
	for i := range out.Items {
		out.Items[i] = *l.Items[i].DeepCopyObject().(*Suppression)
	}
	return &out
}

// suppressions is the row of the kind in the table, as a file in each layer defines it.
var suppressions = kinds.Kind{
	New:     func() compile.Object { return &Suppression{} },
	NewList: func() kinds.List { return &SuppressionList{} },
	Compile: compile.NewKind(compile.Definition[*Suppression, liveconfig.Deletion]{
		Section: "suppressions",
		Entries: func(c *liveconfig.Config) *[]liveconfig.Deletion { return &c.Deletions },
		ID:      func(e liveconfig.Deletion) (string, string) { return e.Name, e.Revision },
		Compiler: func(compile.Snapshot, liveconfig.Config, compile.Verdicts, []*Suppression) func(*Suppression) (liveconfig.Deletion, bool,
			compile.Verdict) {
			return func(o *Suppression) (liveconfig.Deletion, bool, compile.Verdict) {
				entry := liveconfig.Deletion{Name: o.Name, Generation: o.Generation, Revision: "of-" + o.Spec.UserID, UserID: o.Spec.UserID,
					Ended: true, Suppress: true}
				v := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "the spec is valid", Revision: entry.Revision}
				if o.Spec.UserID == "" {
					v.Accepted, v.Reason, v.Message = false, v1beta1.ReasonInvalidSpec, "spec.userID: must be set"
				}
				return entry, v.Accepted, v
			}
		},
	}),
	Health: health.NewKind(health.Definition[Suppression, SuppressionStatus, *Suppression]{
		Name: "Suppression", Conditions: health.DeletionRequests.Conditions,
		Status:  func(o *Suppression) (*SuppressionStatus, *[]metav1.Condition) { return &o.Status, &o.Status.Conditions },
		Summary: func(s *SuppressionStatus) *v1beta1.Summary { return &s.Summary },
		Compute: func(old Suppression, v compile.Verdict, namespace string, pods []health.Pod, now time.Time) SuppressionStatus {
			o := health.Outcome{Reason: v1beta1.ReasonWaiting, Message: "waiting for the dispatchers"}
			if !v.OK() {
				o.Reason, o.Message = v.Cause()
			}
			for _, pod := range pods {
				n := pod.Report.Namespace(namespace)
				if n == nil {
					continue
				}
				if r := n.Deletions[old.Name]; r != nil && r.Revision == v.Revision {
					o = health.Outcome{Complete: true, Reason: v1beta1.ReasonDelivered, Message: "calls are rejected"}
				}
			}
			s := *old.Status.DeepCopy()
			health.SetJobConditions(&s, old.Generation, metav1.NewTime(now.Truncate(time.Second)), v, o)
			s.Conditions = health.Own(s.Conditions, health.DeletionRequests.Conditions)
			return SuppressionStatus{s}
		},
		Expires: func(o *Suppression) (time.Time, bool) {
			return v1beta1.JobExpires(o.Spec.TTLSecondsAfterFinished, o.Status.JobStatus)
		},
	}),
}

// suppressionCRD is also the permission of the operator for the kind.
const suppressionCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: suppressions.posthorn.dev}
spec:
  group: posthorn.dev
  names: {kind: Suppression, listKind: SuppressionList, plural: suppressions, singular: suppression}
  scope: Namespaced
  versions:
  - name: v1beta1
    served: true
    storage: true
    subresources: {status: {}}
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: test-suppressions}
rules:
- {apiGroups: [posthorn.dev], resources: [suppressions, suppressions/status], verbs: [list, watch, delete, patch, update]}
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], resourceNames: [suppressions.posthorn.dev], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: test-suppressions}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: test-suppressions}
subjects: [{kind: ServiceAccount, name: posthorn-operator, namespace: ` + release + `}]
`

// A kind that is added to the table is processed as the others are.
var _ = Describe("A sixth kind", func() {
	It("is listed, compiled, reported, given a status and deleted at the end of its TTL", func() {
		_, err := server.Kubectl(suppressionCRD, "apply", "-f", "-")
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() {
			_, err := server.Kubectl(suppressionCRD, "delete", "-f", "-")
			Expect(err).NotTo(HaveOccurred())
			kindServed.DeleteLabelValues("Suppression")
			statusWrites.DeleteLabelValues("Suppression") // Another spec compares the label values with the docs.
		})
		_, err = server.Kubectl("", "wait", "--for=condition=Established", "crd/suppressions.posthorn.dev")
		Expect(err).NotTo(HaveOccurred())
		w := newWorld(func(w *world) { w.options.kinds = append(slices.Clone(kinds.All), suppressions) })
		namespace := w.newNamespace()
		suppression := func(spec string) string {
			return "apiVersion: posthorn.dev/v1beta1\nkind: Suppression\nmetadata: {name: u1}\nspec: {" + spec + "}\n"
		}
		get := func() (*Suppression, error) {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(v1beta1.GroupVersion.WithKind("Suppression"))
			if err := cluster.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: "u1"}, u); err != nil {
				return nil, err
			}
			o := &Suppression{}
			return o, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o)
		}
		ready := func(g Gomega) string {
			o, err := get()
			g.Expect(err).NotTo(HaveOccurred())
			c := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady)
			g.Expect(c).NotTo(BeNil())
			return string(c.Status) + " " + c.Reason
		}

		By("a verdict that is not accepted")
		w.apply(namespace, suppression(""))
		Eventually(ready).Should(Equal("False " + v1beta1.ReasonInvalidSpec))

		By("an entry in the live config, its report and the status")
		w.apply(namespace, suppression("userID: u1"))
		Eventually(ready).Should(Equal("True " + v1beta1.ReasonDelivered))
		config, _ := w.live(Default, namespace)
		Expect(config.Deletions).To(HaveLen(1))
		Expect(config.Deletions[0].UserID).To(Equal("u1"))
		Eventually(func() []string { return w.events(namespace, "u1") }).Should(ContainElement("Normal " + v1beta1.ReasonDelivered))

		By("its deletion at the end of the TTL")
		w.apply(namespace, suppression("userID: u1, ttlSecondsAfterFinished: 0"))
		Eventually(func() bool { _, err := get(); return apierrors.IsNotFound(err) }).Should(BeTrue())
	})
})
