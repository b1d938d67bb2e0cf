package compile

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// TombstoneGrace is how long a tombstone is kept at least: the dispatchers' default grace period.
const TombstoneGrace = 10 * time.Minute

// History is a namespace's last live config, as far as the next one depends on it. The zero History
// means that the last config is lost, or that there was none.
type History struct {
	// Known is true if the last config is known.
	Known bool
	Head  liveconfig.Head
	// Verified is true if the config is certainly not from a backup: this process has written it, or
	// has compared its number with the report of every pod.
	Verified bool
	// objects are the objects of the config, with the tombstones that they would get.
	objects map[liveconfig.Ref]liveconfig.Tombstone
	// keys are the hashes of the write keys of the config.
	keys map[string]bool
}

// HistoryOf returns the History after a config.
func HistoryOf(last liveconfig.Revisioned) History {
	h := History{Known: true, Head: last.Head, objects: map[liveconfig.Ref]liveconfig.Tombstone{}, keys: last.WriteKeys()}
	for _, r := range last.Objects() {
		h.objects[r] = liveconfig.Tombstone{Object: r, UID: last.Head.UIDs[r]}
	}
	for _, d := range last.Destinations {
		r := liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: d.Name}
		t := h.objects[r]
		t.Sources, t.Filter = d.Sources, d.Filter
		h.objects[r] = t
	}
	return h
}

// Dispatchers is what the dispatcher pods report about the live config of one namespace. Its zero
// value means that there are no pods.
type Dispatchers struct {
	// applied is the highest number that a pod has applied, confirmed the highest one that every
	// ready pod has, and unready the highest one that every other pod has, as far as it is known.
	applied, confirmed, unready int64
	// compared is true if there are pods, and all have reported since the start of the operator.
	compared bool
	// parked are the objects that are parked in a pod, with the number of the last config that had
	// them and the time since when.
	parked map[liveconfig.Ref]parked
	// draining are the deleted objects with data in a pod.
	draining map[liveconfig.Ref]bool
	// reserved are the write keys that belong to the namespace, as a pod reports.
	reserved []liveconfig.ReservedKey
}

type parked struct {
	number int64
	since  time.Time
}

// Reports are the reports of the dispatcher pods about one namespace.
type Reports struct {
	// Ready has the reports of the pods that are ready. Silent is true if one of these pods does not answer.
	Ready  []adminapi.ConfigReport
	Silent bool
	// Unready has the reports of the pods that are not ready, as far as they are known.
	Unready []adminapi.ConfigReport
	// Unknown is true if a pod, ready or not, has not reported since the start of the operator.
	Unknown bool
}

// DispatchersOf returns what the pods report about a namespace.
func DispatchersOf(r Reports) Dispatchers {
	d := Dispatchers{
		compared: len(r.Ready)+len(r.Unready) > 0 && !r.Silent && !r.Unknown,
		parked:   map[liveconfig.Ref]parked{}, draining: map[liveconfig.Ref]bool{},
	}
	d.confirmed, d.unready = d.add(r.Ready), d.add(r.Unready)
	if len(r.Unready) == 0 {
		d.unready = d.confirmed
	}
	if r.Silent {
		d.confirmed = 0
	}
	return d
}

// add adds the reports of pods, and returns the lowest number that they have applied.
func (d *Dispatchers) add(pods []adminapi.ConfigReport) (lowest int64) {
	for i, n := range pods {
		if i == 0 || n.Number < lowest {
			lowest = n.Number
		}
		d.applied = max(d.applied, n.Number)
		for _, p := range n.Parked {
			var r liveconfig.Ref
			if r.UnmarshalText([]byte(p.Object)) != nil {
				continue
			}
			next := parked{number: p.Number, since: p.Since}
			if before, ok := d.parked[r]; ok {
				next.number = max(before.number, p.Number)
				if before.since.Before(p.Since) {
					next.since = before.since
				}
			}
			d.parked[r] = next
		}
		for _, k := range n.Reserved {
			d.reserved = append(d.reserved, liveconfig.ReservedKey(k))
		}
		for _, discard := range n.Discards {
			d.draining[liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: discard.Destination}] = true
			d.draining[liveconfig.Ref{Section: liveconfig.SectionSources, Name: discard.Source}] = true
		}
	}
	return lowest
}

// Reserves reports whether a pod knows reserved write keys.
func (d Dispatchers) Reserves(now time.Time) bool {
	return slices.ContainsFunc(d.reserved, func(k liveconfig.ReservedKey) bool { return !expired(k, now) })
}

// Parks reports whether a pod has parked objects.
func (d Dispatchers) Parks() bool { return len(d.parked) > 0 }

// Restored reports whether a pod has applied a newer config than the last one: the last one is from
// a backup.
func (h History) Restored(d Dispatchers) bool { return d.applied > h.Head.Number }

// Unbroken reports whether the history has no gap: the last config is known, has a number, and is
// certainly not from a backup.
func (h History) Unbroken(d Dispatchers) bool {
	return h.Known && h.Head.Number > 0 && !h.Restored(d) && (h.Verified || d.compared)
}

// Bury returns the history as if the last config had the given objects, so that the next head has tombstones of those
// that do not exist.
func (h History) Bury(refs []liveconfig.Ref) History {
	h.objects = maps.Clone(h.objects)
	for _, r := range refs {
		h.objects[r] = liveconfig.Tombstone{Object: r}
	}
	return h
}

// WithoutRoutes returns the history without the Sources and filters of the deleted destinations. With
// it, the lanes of these destinations receive no calls in case they are restored.
func (h History) WithoutRoutes() History {
	h.objects, h.Head.Tombstones = maps.Clone(h.objects), slices.Clone(h.Head.Tombstones)
	for r, t := range h.objects {
		t.Sources, t.Filter = nil, nil
		h.objects[r] = t
	}
	for i := range h.Head.Tombstones {
		h.Head.Tombstones[i].Sources, h.Head.Tombstones[i].Filter = nil, nil
	}
	return h
}

// HeadBytes returns the encoded size of the next head, rounded up to KiB so that it is the same for
// similar heads; if exact is false, an upper bound that costs less. See Next for the other parameters.
func (h History) HeadBytes(exact bool, present Present, d Dispatchers, now time.Time, grace time.Duration) (int, error) {
	const revision = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" // As long as any.
	head, _ := h.Next(revision, present, d, now, grace)
	if !exact {
		return head.MaxBytes()
	}
	data, err := liveconfig.EncodeHead(head)
	const varies = 64 // The compressed revision and number.
	return ((len(data)+varies)>>10 + 1) << 10, err
}

// Settled reports whether nothing changes in the head or in Verified without a change of an object.
func (h History) Settled(d Dispatchers, now time.Time) bool {
	return len(h.Expired(now)) == 0 && len(h.Head.Tombstones) == 0 && !d.Parks() && !h.Restored(d) && (h.Verified || !d.compared) &&
		!h.removable(d)
}

// Confirmed reports whether every pod, ready or not, has applied the last config.
func (h History) Confirmed(d Dispatchers) bool {
	return d.compared && min(d.confirmed, d.unready) >= h.Head.Number
}

// removable reports whether the Secret of a config without objects can be deleted.
func (h History) removable(d Dispatchers) bool {
	return h.Known && len(h.objects)+len(h.keys)+len(h.Head.UIDs)+len(h.Head.Reserved) == 0 && h.Confirmed(d)
}

// Present is the part of a head that depends on the namespace's objects.
type Present struct {
	// UIDs has the UID of each object that has data in the dispatchers' stores.
	UIDs map[liveconfig.Ref]string
	// Kinds are the UIDs of the CustomResourceDefinitions that the API server serves, by section, with ""
	// for one that it does not serve; nil without an API server.
	Kinds map[string]string
	// Reserved is the result of Reserve; nil if no other namespace can take over a write key.
	Reserved []liveconfig.ReservedKey
}

// Misses reports whether an object of the last config does not exist.
func (h History) Misses(existing map[liveconfig.Ref]string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(h.objects)), func(r liveconfig.Ref) bool {
		_, ok := existing[r]
		return !ok
	})
}

// lost reports whether an object of the last config is missing because the API server deleted its kind:
// the CustomResourceDefinition does not exist, is being deleted, or is another one.
func (h History) lost(r liveconfig.Ref, present Present) bool {
	if _, exists := present.UIDs[r]; exists || present.Kinds == nil {
		return false
	}
	uid, before := present.Kinds[r.Section], h.Head.Kinds[r.Section]
	return uid == "" || before != "" && uid != before
}

// kinds returns the UIDs of the CustomResourceDefinitions of the present objects. An object that the last
// config has, too, cannot be of a new definition: the cache of the objects is older than the definition.
func (h History) kinds(present Present) map[string]string {
	var kinds map[string]string
	stale := map[string]bool{}
	for r, uid := range present.UIDs {
		before := h.Head.Kinds[r.Section]
		stale[r.Section] = stale[r.Section] || before != "" && uid == h.Head.UIDs[r]
		now := cmp.Or(present.Kinds[r.Section], before)
		if stale[r.Section] {
			now = before
		}
		if now != "" {
			if kinds == nil {
				kinds = map[string]string{}
			}
			kinds[r.Section] = now
		}
	}
	return kinds
}

// Reserve returns the reserved write keys beside a config, sorted: the keys that the last config had and
// that this one lacks, and those that were reserved before, for liveconfig.ReservationTime. If the
// last config may be lost, those that the pods know are reserved, too. released returns true for a
// key whose reservation an administrator has ended. Beyond liveconfig.MaxReservedKeys the oldest
// reservations end.
func (h History) Reserve(c liveconfig.Config, d Dispatchers, released func(hash string) bool, now time.Time) []liveconfig.ReservedKey {
	all := map[string]liveconfig.ReservedKey{}
	for hash := range h.keys {
		all[hash] = liveconfig.ReservedKey{SHA256: hash, RemovedAt: now.UTC().Truncate(time.Second)}
	}
	if !h.Unbroken(d) {
		for _, k := range d.reserved {
			all[k.SHA256] = k
		}
	}
	for _, k := range h.Head.Reserved {
		all[k.SHA256] = k
	}
	inEffect := c.WriteKeys()
	list := slices.DeleteFunc(slices.Collect(maps.Values(all)), func(k liveconfig.ReservedKey) bool {
		return inEffect[k.SHA256] || released(k.SHA256) || expired(k, now)
	})
	slices.SortFunc(list, func(a, b liveconfig.ReservedKey) int {
		return cmp.Or(b.RemovedAt.Compare(a.RemovedAt), strings.Compare(a.SHA256, b.SHA256))
	})
	list = list[:min(len(list), liveconfig.MaxReservedKeys)]
	slices.SortFunc(list, func(a, b liveconfig.ReservedKey) int { return strings.Compare(a.SHA256, b.SHA256) })
	return list
}

// WriteKeys returns the hashes of the write keys of the last config that are in effect or reserved. See
// Reserve.
func (h History) WriteKeys(d Dispatchers, now time.Time) map[string]KeyUse {
	keys, inEffect := map[string]KeyUse{}, h.keys
	h.keys = nil // They must not count against MaxReservedKeys.
	for _, k := range h.Reserve(liveconfig.Config{}, d, func(string) bool { return false }, now) {
		keys[k.SHA256] = KeyReserved
	}
	for hash := range inEffect {
		keys[hash] = KeyInUse
	}
	return keys
}

// Expired returns the hashes of the write keys of the last config whose reservation has ended.
func (h History) Expired(now time.Time) (hashes []string) {
	for _, k := range h.Head.Reserved {
		if expired(k, now) {
			hashes = append(hashes, k.SHA256)
		}
	}
	return hashes
}

// expired reports whether a reservation has ended.
func expired(k liveconfig.ReservedKey, now time.Time) bool {
	return now.Sub(k.RemovedAt) >= liveconfig.ReservationTime
}

// Next returns the head of the next config, of the revision, and whether it differs from the last
// one.
//
// A deleted object gets a tombstone, which is removed after the grace, when every pod has removed the
// object's data. A parked object gets one if its deletion is certain, because the history since its
// last config is unbroken, or after liveconfig.ParkingTime. An object that is missing with its kind gets none: it is
// not deleted, and the next history begins without it.
func (h History) Next(revision string, present Present, d Dispatchers, now time.Time, grace time.Duration) (head liveconfig.Head,
	changed bool) {
	head = liveconfig.Head{
		Version: liveconfig.HeadVersion, Number: h.Head.Number, Since: h.Head.Since, Revision: revision,
		UIDs: present.UIDs, Kinds: h.kinds(present), Tombstones: h.tombstones(present, d, now, grace), Reserved: present.Reserved,
	}
	if h.Known && h.Head.Number > 0 && !h.Restored(d) && head.SameAs(h.Head) {
		return h.Head, false
	}
	head.Number = max(max(h.Head.Number, d.applied)+1, now.UnixMilli())
	lost := func(r liveconfig.Ref) bool { return h.lost(r, present) }
	if !h.Unbroken(d) || slices.ContainsFunc(slices.Collect(maps.Keys(h.objects)), lost) {
		head.Since = head.Number
	}
	return head, true
}

// tombstones returns the tombstones of the next head, sorted. A config from a backup proves no
// deletion: neither of its objects that are missing, nor, because they may have been created
// again, of the objects in its tombstones.
func (h History) tombstones(present Present, d Dispatchers, now time.Time, grace time.Duration) []liveconfig.Tombstone {
	all := map[liveconfig.Ref]liveconfig.Tombstone{}
	if h.Restored(d) {
		h.objects, h.Head.Tombstones = nil, nil
	}
	lost := map[liveconfig.Ref]bool{}
	for r, t := range h.objects {
		t.DeletedAt = now.UTC().Truncate(time.Second)
		if lost[r] = h.lost(r, present); !lost[r] {
			all[r] = t
		}
	}
	unbroken := h.Unbroken(d)
	for r, p := range d.parked {
		certain := unbroken && p.number >= h.Head.Since && !lost[r]
		if _, known := all[r]; !known && (certain || now.Sub(p.since) >= liveconfig.ParkingTime) {
			all[r] = liveconfig.Tombstone{Object: r, DeletedAt: now.UTC().Truncate(time.Second)}
		}
	}
	for _, t := range h.Head.Tombstones {
		_, parked := d.parked[t.Object]
		if now.Sub(t.DeletedAt) < grace || d.confirmed < h.Head.Number || parked || d.draining[t.Object] {
			all[t.Object] = t
		} else {
			delete(all, t.Object)
		}
	}
	for r := range present.UIDs {
		delete(all, r)
	}
	return slices.SortedFunc(maps.Values(all), func(a, b liveconfig.Tombstone) int {
		return strings.Compare(a.Object.String(), b.Object.String())
	})
}

// Existing returns the UIDs of the objects that have data in the dispatchers' stores.
func (t Table) Existing(objects []Object) map[liveconfig.Ref]string {
	existing := map[liveconfig.Ref]string{}
	for _, o := range objects {
		for _, k := range t {
			if k.is(o) && slices.Contains([]string{liveconfig.SectionSources, liveconfig.SectionDestinations, liveconfig.SectionAudiences},
				k.Section) {
				existing[liveconfig.Ref{Section: k.Section, Name: o.GetName()}] = string(o.GetUID())
			}
		}
	}
	return existing
}
