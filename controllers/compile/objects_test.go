package compile

import "github.com/posthorn/posthorn/api/v1beta1"

// table is the table of package kinds, which imports this package.
var table = Table{Destinations, Sources, Audiences, Deletions, Redeliveries}

// pointers returns pointers to copies of objects, for Snapshot.Objects.
func pointers[T any, O interface {
	*T
	Object
}](objects ...T) (all []Object) {
	for _, o := range objects {
		all = append(all, O(&o))
	}
	return all
}

// sourcesOf and destinationsOf return a snapshot's objects of a kind, sorted by name.
func sourcesOf(s *Snapshot) []*v1beta1.Source { return objectsOf[*v1beta1.Source](*s) }

func destinationsOf(s *Snapshot) []*v1beta1.WebhookDestination {
	return objectsOf[*v1beta1.WebhookDestination](*s)
}
