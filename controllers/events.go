package controllers

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

// eventSource is the reporting controller of the operator's Events.
const eventSource = "posthorn.dev/operator"

// The reasons of the Events about dispatcher pods.
const (
	reasonPodSilent  = "DispatcherSilent"
	reasonPodAnswers = "DispatcherAnswers"
	reasonStranded   = "MessagesStranded"
)

// silentPodEvents returns a function that writes an Event to the workload of a dispatcher
// pod when the pod becomes silent, and when it answers again.
func silentPodEvents(recorder events.EventRecorder) func(pod Pod, silent bool) {
	return func(pod Pod, silent bool) {
		if pod.Workload.Name == "" {
			return
		}
		workload := pod.Workload
		if silent {
			recorder.Eventf(&workload, nil, corev1.EventTypeWarning, reasonPodSilent, "Report",
				"dispatcher pod %s is ready, but has not answered the operator for %s; the statuses of its objects show its last report", pod.Name, answerGrace)
		} else {
			recorder.Eventf(&workload, nil, corev1.EventTypeNormal, reasonPodAnswers, "Report",
				"dispatcher pod %s answers the operator again", pod.Name)
		}
	}
}
