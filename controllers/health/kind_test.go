package health

import (
	"time"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// pacedDestination, pacedSource and pacedAudience return the status that Kind.Next computes.
func pacedDestination(o v1alpha1.WebhookDestination, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) v1alpha1.WebhookDestinationStatus {
	return Destinations.Next(&o, v, namespace, pods, now, numbersDue).(*v1alpha1.WebhookDestination).Status
}

func pacedSource(o v1alpha1.Source, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) v1alpha1.SourceStatus {
	return Sources.Next(&o, v, namespace, pods, now, numbersDue).(*v1alpha1.Source).Status
}

func pacedAudience(o v1alpha1.Audience, v compile.Verdict, namespace string, pods []Pod, now time.Time, numbersDue bool) v1alpha1.AudienceStatus {
	return Audiences.Next(&o, v, namespace, pods, now, numbersDue).(*v1alpha1.Audience).Status
}
