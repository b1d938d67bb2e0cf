package compile

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

var (
	refWeb = liveconfig.Ref{Section: liveconfig.SectionSources, Name: "web"}
	refCRM = liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}
	refERP = liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "erp"}
)

// The last config has the Source web and the destination crm, and the number of start.
func TestNextHead(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	number := start.UnixMilli()
	filter := &liveconfig.Filter{Types: []string{"track"}}
	uids := map[liveconfig.Ref]string{refWeb: "1", refCRM: "2"}
	config := liveconfig.Config{
		Namespace: "shop", Sources: []liveconfig.Source{{Name: "web"}},
		Destinations: []liveconfig.Destination{{Name: "crm", Sources: []string{"web"}, Filter: filter}},
	}
	last := liveconfig.Head{Version: liveconfig.HeadVersion, Number: number, Since: 100, Revision: "r1", UIDs: uids}
	onlyWeb := map[liveconfig.Ref]string{refWeb: "1"}
	restored := map[liveconfig.Ref]string{refWeb: "1", refCRM: "3"}
	kinds := func(destinations string) map[string]string {
		return map[string]string{"sources": "s", "destinations": destinations}
	}
	ofKinds := func(h liveconfig.Head, destinations string) liveconfig.Head {
		h.Kinds = kinds(destinations)
		return h
	}
	deleted := liveconfig.Tombstone{Object: refCRM, UID: "2", DeletedAt: start.Add(time.Hour), Sources: []string{"web"}, Filter: filter}
	tombstone := func(r liveconfig.Ref, age time.Duration) liveconfig.Tombstone {
		return liveconfig.Tombstone{Object: r, DeletedAt: start.Add(time.Hour - age)}
	}
	pod := func(n int64, change ...func(*adminapi.ConfigReport)) adminapi.ConfigReport {
		r := adminapi.ConfigReport{Number: n}
		for _, f := range change {
			f(&r)
		}
		return r
	}
	parks := func(r liveconfig.Ref, number int64, age time.Duration) func(*adminapi.ConfigReport) {
		return func(n *adminapi.ConfigReport) {
			n.Parked = append(n.Parked, adminapi.ParkedObject{Object: r.String(), Number: number, Since: start.Add(time.Hour - age)})
		}
	}
	drains := func(n *adminapi.ConfigReport) {
		n.Discards = []adminapi.Discard{{Source: "web", Destination: "erp", Messages: 1}}
	}
	for name, c := range map[string]struct {
		head     liveconfig.Head // Default last.
		unknown  bool
		restart  bool   // The operator has started; it has not verified the last config.
		revision string // Default r1.
		existing map[liveconfig.Ref]string
		pods     []adminapi.ConfigReport
		silent   bool
		unready  []adminapi.ConfigReport
		kinds    map[string]string
		unheard  bool          // A pod has not reported since the start of the operator.
		later    time.Duration // Default an hour.
		// Expected.
		unchanged  bool
		number     int64 // Default the time.
		since      int64 // Default 100.
		tombstones []liveconfig.Tombstone
		kept       map[string]string // The kinds of the head.
	}{
		"nothing changed":  {existing: uids, pods: []adminapi.ConfigReport{pod(number)}, unchanged: true},
		"another revision": {revision: "r2", existing: uids},
		"another UID":      {existing: map[liveconfig.Ref]string{refWeb: "1", refCRM: "3"}},
		"kind not served": {head: ofKinds(last, "k1"), existing: onlyWeb, kinds: kinds(""), since: -1,
			kept: map[string]string{"sources": "s"}},
		"kind replaced": {head: ofKinds(last, "k1"), existing: onlyWeb, kinds: kinds("k2"), since: -1,
			kept: map[string]string{"sources": "s"}},
		"kind replaced, object restored":  {head: ofKinds(last, "k1"), existing: restored, kinds: kinds("k2"), kept: kinds("k2")},
		"kind replaced, cache is older":   {head: ofKinds(last, "k1"), existing: uids, kinds: kinds("k2"), unchanged: true},
		"kind not served, unknown before": {existing: onlyWeb, kinds: kinds(""), since: -1, kept: map[string]string{"sources": "s"}},
		"kind not served, objects cached": {head: ofKinds(last, "k1"), existing: uids, kinds: kinds(""), unchanged: true},
		"kind served, object deleted":     {head: ofKinds(last, "k1"), existing: onlyWeb, kinds: kinds("k1"), tombstones: []liveconfig.Tombstone{deleted}, kept: map[string]string{"sources": "s"}},
		"kind not served, a pod parks":    {head: ofKinds(last, "k1"), existing: onlyWeb, kinds: kinds(""), pods: []adminapi.ConfigReport{pod(number, parks(refCRM, number, 0))}, since: -1, kept: map[string]string{"sources": "s"}},
		"kind not served for a week":      {head: ofKinds(last, "k1"), existing: onlyWeb, kinds: kinds(""), pods: []adminapi.ConfigReport{pod(number, parks(refCRM, number, 7*24*time.Hour))}, since: -1, kept: map[string]string{"sources": "s"}, tombstones: []liveconfig.Tombstone{tombstone(refCRM, 0)}},
		"clock set back":                  {revision: "r2", existing: uids, later: -time.Hour, number: number + 1},
		"object deleted":                  {revision: "r2", existing: onlyWeb, tombstones: []liveconfig.Tombstone{deleted}},
		"a pod has a newer config":        {existing: uids, pods: []adminapi.ConfigReport{pod(number), pod(number + 5)}, since: -1},
		"object missing after a restore":  {existing: onlyWeb, pods: []adminapi.ConfigReport{pod(number + 5)}, since: -1},
		"tombstone from a backup": {head: buried(last, tombstone(refERP, 0)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number + 5)}, since: -1},
		"a pod is ahead of the clock": {existing: uids, pods: []adminapi.ConfigReport{pod(number * 2)}, number: number*2 + 1, since: -1},
		"last config unknown":         {unknown: true, existing: uids, pods: []adminapi.ConfigReport{pod(number)}, since: -1},
		"without a number":            {head: liveconfig.Head{Revision: "r1"}, revision: "r2", existing: onlyWeb, since: -1, tombstones: []liveconfig.Tombstone{{Object: refCRM, DeletedAt: start.Add(time.Hour), Sources: []string{"web"}, Filter: filter}}},

		"parked, deletion certain": {existing: uids, pods: []adminapi.ConfigReport{pod(number, parks(refERP, 100, 0))},
			tombstones: []liveconfig.Tombstone{tombstone(refERP, 0)}},
		"parked, history incomplete": {existing: uids, pods: []adminapi.ConfigReport{pod(number, parks(refERP, 99, 6*24*time.Hour))},
			unchanged: true},
		"parked for a week": {existing: uids, pods: []adminapi.ConfigReport{pod(number, parks(refERP, 99, 7*24*time.Hour))},
			tombstones: []liveconfig.Tombstone{tombstone(refERP, 0)}},
		"parked by a restored Secret": {existing: uids, since: -1,
			pods: []adminapi.ConfigReport{pod(number+5, parks(refERP, number+5, 0))}},
		"parked and existing": {existing: uids, pods: []adminapi.ConfigReport{pod(number, parks(refCRM, 100, 0))}, unchanged: true},

		"first change, all pods compared": {restart: true, revision: "r2", existing: uids, pods: []adminapi.ConfigReport{pod(number)}},
		"first change, no pods":           {restart: true, revision: "r2", existing: uids, since: -1},
		"first change, a silent pod": {restart: true, revision: "r2", existing: uids, pods: []adminapi.ConfigReport{pod(number)},
			silent: true, since: -1},
		"first change, an unready pod": {restart: true, revision: "r2", existing: uids, pods: []adminapi.ConfigReport{pod(number)},
			unready: []adminapi.ConfigReport{pod(number - 1)}},
		"first change, an unheard pod": {restart: true, revision: "r2", existing: uids, pods: []adminapi.ConfigReport{pod(number)},
			unheard: true, since: -1},
		"no change, no pods": {restart: true, existing: uids, unchanged: true},
		"parked, not verified": {restart: true, existing: uids, pods: []adminapi.ConfigReport{pod(number, parks(refERP, 100, 0))},
			unheard: true, unchanged: true},
		"an unready pod has a newer config": {existing: uids, unready: []adminapi.ConfigReport{pod(number + 5)}, since: -1},
		"parked in an unready pod": {existing: uids, unready: []adminapi.ConfigReport{pod(number, parks(refERP, 100, 0))},
			tombstones: []liveconfig.Tombstone{tombstone(refERP, 0)}},
		"unready pods do not confirm": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids,
			unready: []adminapi.ConfigReport{pod(number)}, unchanged: true},
		"unready pods do not prevent removal": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number)}, unready: []adminapi.ConfigReport{pod(number - 1)}},

		"tombstone within the grace": {head: buried(last, tombstone(refERP, 9*time.Minute)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number)}, unchanged: true},
		"tombstone confirmed": {head: buried(last, tombstone(refERP, 10*time.Minute)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number), pod(number)}},
		"tombstone of a restored object": {head: buried(last, tombstone(refCRM, 0)), existing: uids, pods: []adminapi.ConfigReport{pod(number)}},
		"a pod has not confirmed": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number), pod(number - 1)}, unchanged: true},
		"a pod has data": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number, drains)}, unchanged: true},
		"a pod does not answer": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids,
			pods: []adminapi.ConfigReport{pod(number)}, silent: true, unchanged: true},
		"no pods": {head: buried(last, tombstone(refERP, time.Hour)), existing: uids, unchanged: true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.head.Revision == "" {
				c.head = last
			}
			var h History
			if !c.unknown {
				h = HistoryOf(liveconfig.Revisioned{Config: config, Revision: "r1", Head: c.head})
			}
			if c.revision == "" {
				c.revision = "r1"
			}
			now := start.Add(time.Hour + c.later)
			if c.later < 0 {
				now = start.Add(c.later)
			}
			h.Verified = !c.restart
			reports := Reports{Ready: c.pods, Silent: c.silent, Unready: c.unready, Unknown: c.unheard}
			head, changed := h.Next(c.revision, Present{UIDs: c.existing, Kinds: c.kinds}, DispatchersOf(reports), now, TombstoneGrace)
			if changed == c.unchanged {
				t.Errorf("changed: got %t, want %t", changed, !c.unchanged)
			}
			if c.unchanged {
				if diff := cmp.Diff(c.head, head); diff != "" {
					t.Errorf("head (-want +got):\n%s", diff)
				}
				return
			}
			want := liveconfig.Head{Version: liveconfig.HeadVersion, Number: c.number, Since: c.since, Revision: c.revision, UIDs: c.existing,
				Kinds: c.kept, Tombstones: c.tombstones}
			if want.Number == 0 {
				want.Number = now.UnixMilli()
			}
			switch {
			case c.since < 0:
				want.Since = want.Number
			case c.head.Number > 0:
				want.Since = 100
			}
			if diff := cmp.Diff(want, head); diff != "" {
				t.Errorf("head (-want +got):\n%s", diff)
			}
		})
	}
}

func buried(h liveconfig.Head, t liveconfig.Tombstone) liveconfig.Head {
	h.Tombstones = []liveconfig.Tombstone{t}
	return h
}

// Keys in effect do not count against the maximum of reserved keys.
func TestReservedBesideManyKeysInEffect(t *testing.T) {
	now := time.Date(2026, 1, 8, 0, 0, 0, 0, time.UTC)
	source := liveconfig.Source{Name: "web"}
	for i := range liveconfig.MaxReservedKeys {
		source.WriteKeySHA256 = append(source.WriteKeySHA256, fmt.Sprintf("%04d", i))
	}
	h := HistoryOf(liveconfig.Revisioned{
		Config: liveconfig.Config{Sources: []liveconfig.Source{source}},
		Head:   liveconfig.Head{Number: 5, Reserved: []liveconfig.ReservedKey{{SHA256: "gone", RemovedAt: now.Add(-time.Hour)}}},
	})
	h.Verified = true
	keys := h.WriteKeys(Dispatchers{}, now)
	check.Equal(t, "use of the removed key", keys["gone"], KeyReserved)
	check.Equal(t, "keys", len(keys), liveconfig.MaxReservedKeys+1)
}

func TestReservedWriteKeys(t *testing.T) {
	now := time.Date(2026, 1, 8, 0, 0, 0, 0, time.UTC)
	key := func(hash string, age time.Duration) liveconfig.ReservedKey {
		return liveconfig.ReservedKey{SHA256: hash, RemovedAt: now.Add(-age)}
	}
	config := func(hashes ...string) liveconfig.Config {
		return liveconfig.Config{Sources: []liveconfig.Source{{Name: "web", WriteKeySHA256: hashes}}}
	}
	head := func(number int64, keys ...liveconfig.ReservedKey) liveconfig.Head {
		return liveconfig.Head{Number: number, Reserved: keys}
	}
	const day = 24 * time.Hour
	pod := DispatchersOf(Reports{Ready: []adminapi.ConfigReport{{Number: 5,
		Reserved: []adminapi.ReservedKey{{SHA256: "pod", RemovedAt: now.Add(-day)}, {SHA256: "old", RemovedAt: now.Add(-8 * day)}}}}})
	known := func(c liveconfig.Config, h liveconfig.Head) History {
		history := HistoryOf(liveconfig.Revisioned{Config: c, Head: h})
		history.Verified = true
		return history
	}
	var many []liveconfig.ReservedKey
	for i := range liveconfig.MaxReservedKeys {
		many = append(many, key(fmt.Sprintf("%04d", i), time.Hour))
	}
	for name, c := range map[string]struct {
		history  History
		next     liveconfig.Config
		pods     Dispatchers
		released string
		want     []liveconfig.ReservedKey
	}{
		"in effect":               {history: known(config("a"), head(5)), next: config("a")},
		"removed":                 {history: known(config("b", "a"), head(5)), next: config("b"), want: []liveconfig.ReservedKey{key("a", 0)}},
		"removed with its Source": {history: known(config("a"), head(5)), want: []liveconfig.ReservedKey{key("a", 0)}},
		"reserved before": {history: known(config(), head(5, key("a", 6*day), key("b", 7*day))),
			want: []liveconfig.ReservedKey{key("a", 6*day)}},
		"removed again":   {history: known(config("a"), head(5)), pods: pod, want: []liveconfig.ReservedKey{key("a", 0)}},
		"in effect again": {history: known(config(), head(5, key("a", day))), next: config("a")},
		"released": {history: known(config("b"), head(5, key("a", day))), released: "a",
			want: []liveconfig.ReservedKey{key("b", 0)}},
		"the config is lost": {pods: pod, want: []liveconfig.ReservedKey{key("pod", day)}},
		"the config is a backup": {history: known(config("a"), head(4)), next: config("a"), pods: pod,
			want: []liveconfig.ReservedKey{key("pod", day)}},
		"a pod knows a key in use": {next: config("pod"), pods: pod},
		"more than the bound":      {history: known(config("new"), head(5, append(many, key("oldest", day))...)), want: append(slices.Clone(many[:liveconfig.MaxReservedKeys-1]), key("new", 0))},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.history.Reserve(c.next, c.pods, func(hash string) bool { return hash == c.released }, now)
			if diff := cmp.Diff(c.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("reserved keys (-want +got):\n%s", diff)
			}
		})
	}
}

// A live config is deleted only after all pods have applied it: also those that are not ready, and
// not before all of them have reported.
func TestConfirmed(t *testing.T) {
	const last = 5
	h := History{Head: liveconfig.Head{Number: last}}
	pods := func(numbers ...int64) (list []adminapi.ConfigReport) {
		for _, n := range numbers {
			list = append(list, adminapi.ConfigReport{Number: n})
		}
		return list
	}
	for name, c := range map[string]struct {
		reports Reports
		want    bool
	}{
		"all pods":            {Reports{Ready: pods(last, last+1), Unready: pods(last)}, true},
		"no unready pod":      {Reports{Ready: pods(last)}, true},
		"an outdated pod":     {Reports{Ready: pods(last, last-1)}, false},
		"an outdated unready": {Reports{Ready: pods(last), Unready: pods(last, last-1)}, false},
		"only unready pods":   {Reports{Unready: pods(last)}, false},
		"an unknown pod":      {Reports{Ready: pods(last), Unknown: true}, false},
		"a silent pod":        {Reports{Ready: pods(last), Silent: true}, false},
		"no pods":             {Reports{}, false},
	} {
		check.Equal(t, name, h.Confirmed(DispatchersOf(c.reports)), c.want)
	}
}
