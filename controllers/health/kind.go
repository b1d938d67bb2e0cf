package health

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// Kind computes the status of the objects of one kind. NewKind returns one.
type Kind struct {
	Name string
	// Conditions are the types of the conditions that the operator writes, in order.
	Conditions []string
	// NumbersInterval is the shortest time between two writes of an object's numbers; 0 is
	// the default of the caller.
	NumbersInterval time.Duration

	// Next returns two copies of an object with its present status, from the compiler's verdict
	// and the reports of the ready dispatcher pods. The status of transition differs from the
	// object's only with a transition: see the package comment. The status of latest has the present
	// numbers, too. The copies share the metadata and the spec of the object.
	Next func(o compile.Object, v compile.Verdict, namespace string, pods []Pod, now time.Time) (transition, latest compile.Object)
	// Idle reports whether the statuses of two versions of an object differ only in numbers that change while
	// nothing is sent to or from the object.
	Idle func(old, next compile.Object) bool
	// Status returns a pointer to an object's status, and to the conditions in it.
	Status func(compile.Object) (any, *[]metav1.Condition)
	// CopyStatus sets the status of an object to the status of another one.
	CopyStatus func(to, from compile.Object)
	// Expires returns when an object is to be deleted; false for an object that is kept.
	Expires func(compile.Object) (time.Time, bool)
	// ChangesAt returns when the status of an object changes even if no report does; false
	// if it does not.
	ChangesAt func(compile.Object) (time.Time, bool)
	// Job returns the common status of a kind that runs once; nil for other kinds.
	Job func(compile.Object) *v1beta1.JobStatus
	// Summarize sets the summary of a status from its conditions.
	Summarize func(compile.Object)
}

// Definition defines a Kind: O is a pointer to T, the type of its objects, and S the type
// of their status.
type Definition[T, S any, O pointer[T]] struct {
	Name       string
	Conditions []string
	// Compute returns the status. It must not change old.
	Compute func(old T, v compile.Verdict, namespace string, pods []Pod, now time.Time) S
	// Status returns an object's status, and the conditions in it.
	Status func(O) (*S, *[]metav1.Condition)
	// Summary returns the summary in a status.
	Summary func(*S) *v1beta1.Summary
	// ClearNumbers removes the numbers from a status, so that the rest has only
	// transitions; nil if every change is one.
	ClearNumbers    func(*S)
	NumbersInterval time.Duration
	// ObservedTime returns the time of the numbers in a status; nil for kinds without.
	ObservedTime func(*S) **metav1.Time
	// WithoutIdle returns a status without the numbers that change while nothing is sent; nil if there are none.
	WithoutIdle func(S) S
	// DelayedRecovery is the condition to which recoveryDelay applies; empty for none.
	DelayedRecovery string
	// Job returns the common part of the status of a kind that runs once.
	Job func(O) *v1beta1.JobStatus
	// Expires returns when an object is to be deleted; nil for kinds without a TTL.
	Expires func(O) (time.Time, bool)
	// ChangesAt returns when the status changes even if no report does; nil for kinds whose
	// status depends on nothing else.
	ChangesAt func(O) (time.Time, bool)
}

// pointer is a pointer to a type of package v1beta1.
type pointer[T any] interface {
	*T
	compile.Object
}

// NewKind returns the Kind of a definition.
func NewKind[T, S any, O pointer[T]](d Definition[T, S, O]) Kind {
	return Kind{
		Name: d.Name, Conditions: d.Conditions, NumbersInterval: d.NumbersInterval,
		Next: func(o compile.Object, v compile.Verdict, namespace string, pods []Pod, now time.Time) (transition, latest compile.Object) {
			old := copyOf[T](o.(O))
			_, conditions := d.Status(old)
			*conditions = Own(*conditions, d.Conditions)
			next := copyOf[T](old)
			status, _ := d.Status(next)
			*status = d.Compute(*old, v, namespace, pods, now)
			d.summarize(next)
			if d.onlyObserved(old, next) {
				return old, old
			}
			return d.transition(old, next, now), next
		},
		Idle: func(old, next compile.Object) bool {
			if d.WithoutIdle == nil {
				return false
			}
			before, _ := d.Status(old.(O))
			after, _ := d.Status(next.(O))
			return equality.Semantic.DeepEqual(d.WithoutIdle(*before), d.WithoutIdle(*after))
		},
		Status: func(o compile.Object) (any, *[]metav1.Condition) { return d.Status(o.(O)) },
		CopyStatus: func(to, from compile.Object) {
			status, _ := d.Status(to.(O))
			other, _ := d.Status(from.(O))
			*status = *other
		},
		Expires:   timeOf(d.Expires),
		ChangesAt: timeOf(d.ChangesAt),
		Job: func(o compile.Object) *v1beta1.JobStatus {
			if d.Job == nil {
				return nil
			}
			return d.Job(o.(O))
		},
		Summarize: func(o compile.Object) { d.summarize(o.(O)) },
	}
}

// summarize sets the summary of a status from its conditions.
func (d Definition[T, S, O]) summarize(o O) {
	status, conditions := d.Status(o)
	summary := d.Summary(status)
	if *summary = (v1beta1.Summary{}); len(*conditions) > 0 {
		worst := v1beta1.Worst(*conditions)
		summary.Reason, summary.Message = worst.Reason, compile.Truncate(worst.Message, maxSummaryBytes)
	}
}

func timeOf[O compile.Object](f func(O) (time.Time, bool)) func(compile.Object) (time.Time, bool) {
	return func(o compile.Object) (time.Time, bool) {
		if f == nil {
			return time.Time{}, false
		}
		return f(o.(O))
	}
}

// onlyObserved reports whether the statuses of two versions of an object differ at most by
// the time of their numbers.
func (d Definition[T, S, O]) onlyObserved(old, next O) bool {
	if d.ObservedTime == nil {
		return false
	}
	before, _ := d.Status(old)
	after, _ := d.Status(next)
	observed := *d.ObservedTime(after)
	*d.ObservedTime(after) = *d.ObservedTime(before)
	same := equality.Semantic.DeepEqual(before, after)
	*d.ObservedTime(after) = observed
	return same
}

// transition returns next with the recoveryDelay if the statuses of two versions of an object
// then differ by more than numbers, and old otherwise.
func (d Definition[T, S, O]) transition(old, next O, now time.Time) O {
	if d.ClearNumbers == nil {
		return next
	}
	if d.DelayedRecovery != "" {
		next = copyOf[T](next)
		_, before := d.Status(old)
		_, after := d.Status(next)
		*after = delayRecovery(*before, *after, d.DelayedRecovery, now)
		d.summarize(next)
	}
	transitions := func(o O) S {
		var only T // Without the metadata and the spec, which are not compared.
		status, _ := d.Status(&only)
		from, _ := d.Status(o)
		*status = *from
		status, conditions := d.Status(O(&only).DeepCopyObject().(O))
		*conditions = withoutNumbers(*conditions)
		*d.Summary(status) = v1beta1.Summary{}
		d.ClearNumbers(status)
		return *status
	}
	if equality.Semantic.DeepEqual(transitions(old), transitions(next)) {
		return old
	}
	return next
}

// copyOf returns a shallow copy of an object.
func copyOf[T any, O pointer[T]](o O) O {
	next := *o
	return &next
}

// The condition types of the kinds that run once, in their order in a status.
var jobConditions = []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs, v1beta1.ConditionComplete, v1beta1.ConditionFailed,
	v1beta1.ConditionReady, v1beta1.ConditionStalled}

// conditionTypes returns the condition types of another kind, with its traffic condition.
func conditionTypes(traffic string) []string {
	return []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs, v1beta1.ConditionProgrammed, v1beta1.ConditionReady, traffic,
		v1beta1.ConditionStalled}
}

// Own returns the conditions of these types that the operator has written, in the order
// of types. It excludes conditions of other controllers and the defaults of the CRD. The API
// server may store conditions in another order.
func Own(conditions []metav1.Condition, types []string) (own []metav1.Condition) {
	for _, conditionType := range types {
		if c := meta.FindStatusCondition(conditions, conditionType); c != nil && !isDefault(*c) {
			own = append(own, *c)
		}
	}
	return slices.Clip(own)
}

// isDefault reports whether a condition is the default of the CRD.
func isDefault(c metav1.Condition) bool {
	return c.Status == metav1.ConditionUnknown && c.Reason == v1beta1.ReasonPending
}
