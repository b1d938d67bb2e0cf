package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

// maxNamedInDiscard bounds the names in the announcement of discards.
const maxNamedInDiscard = 3

// discardAheadOfSource announces the pending messages of a Source that will be discarded, as a part of the
// message of Ready; "" if there are none. It has no numbers and an absolute time, so that it does not
// change until they are discarded.
func discardAheadOfSource(pods []Pod, namespace, name string) string {
	of := func(all []adminapi.Discard, add func(adminapi.Discard, string)) {
		for _, d := range all {
			if d.Source == name {
				add(d, d.Destination)
			}
		}
	}
	return announcement(pods, namespace, of, "for WebhookDestination", "destination")
}

// discardAheadOfDestination is discardAheadOfSource for a destination. The discards are sorted by
// destination, so that a namespace with many of both does not need the square of their number.
func discardAheadOfDestination(pods []Pod, namespace, name string) string {
	of := func(all []adminapi.Discard, add func(adminapi.Discard, string)) {
		first, _ := slices.BinarySearchFunc(all, name, func(d adminapi.Discard, name string) int { return strings.Compare(d.Destination, name) })
		for _, d := range all[first:] {
			if d.Destination != name {
				break
			}
			add(d, d.Source)
		}
	}
	return announcement(pods, namespace, of, "of Source", "Source")
}

// announcement describes the discards of messages between an object and others of a kind. The parameter of
// selects the discards of the object: it calls add with each and the name of the other object. As for
// conditions, the last report of a pod that is absent or silent counts until it is outdated. Package why
// recognizes the first words.
func announcement(pods []Pod, namespace string, of func(all []adminapi.Discard, add func(adminapi.Discard, string)), relation,
	kind string) string {
	var others []string
	var at time.Time
	for _, pod := range pods {
		if pod.Outdated {
			continue
		}
		of(pod.Report.Config(namespace).Discards, func(d adminapi.Discard, other string) {
			if d.Messages > 0 {
				others, at = append(others, other), observed.Earlier(at, d.At)
			}
		})
	}
	if len(others) == 0 {
		return ""
	}
	slices.Sort(others)
	others = slices.Compact(others)
	named := make([]string, 0, maxNamedInDiscard)
	for _, name := range others[:min(len(others), maxNamedInDiscard)] {
		named = append(named, fmt.Sprintf("%q", name))
	}
	if more := len(others) - len(named); more > 0 {
		named = append(named, plural.Count(more, "other"))
	}
	return fmt.Sprintf("pending messages %s %s will be discarded at %s, because the %s, its connection or an endpoint was deleted; create it again to keep them",
		relation, strings.Join(named, ", "), observed.Timestamp(at).Format(time.RFC3339), kind)
}
