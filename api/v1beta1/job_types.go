package v1beta1

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// JobSpec has the fields that Redelivery and DeletionRequest share. An object of
// these kinds runs once, as a Job of batch/v1 does, and its fields have that
// kind's names.
type JobSpec struct {
	// A name for this run. The namespace, the name and the spec identify a run, and a
	// completed run is not repeated within 30 days, even if the object is deleted and
	// created again (reason AlreadyDone). Set another requestID to run it again.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +optional
	RequestID string `json:"requestID,omitempty"`

	// The maximum duration of the run in seconds, from status.startTime. A longer
	// run is stopped, and Failed is True with the reason DeadlineExceeded. Default:
	// no deadline.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	// +optional
	ActiveDeadlineSeconds *int64 `json:"activeDeadlineSeconds,omitempty"`

	// The object is deleted this many seconds after the end of the run; 0 deletes
	// it immediately. Default: the object is kept. This is the only field that can
	// be changed.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=31536000
	// +optional
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// JobStatus has the status fields that Redelivery and DeletionRequest share.
type JobStatus struct {
	// The conditions Accepted, ResolvedRefs, Complete, Failed and Ready; Stalled is present only
	// while it is True. Conditions of other types, which other controllers set, are
	// kept.
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// The generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	Summary `json:",inline"`

	// The start time of the run; not set before the run starts.
	// +optional
	StartTime *metav1.Time `json:"startTime,omitempty"`

	// The completion time of the run; not set if the run failed.
	// +optional
	CompletionTime *metav1.Time `json:"completionTime,omitempty"`
}

// DefaultRedeliveryRate is the default of spec.deadLettersPerSecond of a Redelivery.
const DefaultRedeliveryRate = 100

// JobEnded reports whether a run has ended, completed or failed.
func JobEnded(s JobStatus) bool { return jobEnd(s) != nil }

// JobExpires returns when an object with this TTL is to be deleted. It returns false for an
// object that is kept.
func JobExpires(ttlSecondsAfterFinished *int32, s JobStatus) (time.Time, bool) {
	end := jobEnd(s)
	if end == nil || ttlSecondsAfterFinished == nil {
		return time.Time{}, false
	}
	return end.LastTransitionTime.Add(time.Duration(*ttlSecondsAfterFinished) * time.Second), true
}

// jobEnd returns the condition that ended a run, or nil.
func jobEnd(s JobStatus) *metav1.Condition {
	for _, conditionType := range []string{ConditionComplete, ConditionFailed} {
		if c := meta.FindStatusCondition(s.Conditions, conditionType); c != nil && c.Status == metav1.ConditionTrue {
			return c
		}
	}
	return nil
}
