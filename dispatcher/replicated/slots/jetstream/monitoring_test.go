package jetstream

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"
)

// reading is a reading of the stream of a slot with records from 100 on; a leads.
func reading(a, b, c extent) extents {
	return extents{leader: a, servers: map[string]extent{"a": a, "b": b, "c": c}}
}

func upTo(last uint64) extent { return from(100, last) }

func from(first, last uint64) extent { return extent{last - first + 1, first, last} }

func without(n uint64, e extent) extent { return extent{e.messages - n, e.first, e.last} }

// A server lacks records only if this is seen twice, and neither load nor a trim explains it.
func TestLacking(t *testing.T) {
	for name, c := range map[string]struct {
		before, now extents
		behind      string
		want        map[string]uint64
	}{
		"idle": {before: reading(upTo(200), upTo(200), upTo(200)), now: reading(upTo(215), upTo(215), upTo(215))},
		"load": {before: reading(upTo(200), upTo(190), upTo(230)),
			now: reading(upTo(9000), upTo(8500), upTo(9100))},
		"a first reading":     {now: reading(upTo(200), without(5, upTo(200)), upTo(200))},
		"a gap":               {before: reading(upTo(200), without(6, upTo(190)), upTo(200)), now: reading(upTo(300), without(5, upTo(301)), upTo(300)), want: map[string]uint64{"b": 5}},
		"a gap of the leader": {before: reading(without(5, upTo(200)), upTo(200), upTo(200)), now: reading(without(5, upTo(300)), upTo(300), upTo(300)), want: map[string]uint64{"a": 5}},
		"gaps of two":         {before: reading(upTo(200), without(5, upTo(200)), without(7, upTo(200))), now: reading(upTo(300), without(5, upTo(300)), without(7, upTo(300))), want: map[string]uint64{"b": 5, "c": 7}},
		"a gap that was repaired": {before: reading(upTo(200), without(5, upTo(200)), upTo(200)),
			now: reading(from(280, 300), from(280, 300), from(280, 300))},
		"a lost start": {before: reading(upTo(200), from(150, 200), upTo(200)), now: reading(upTo(300), from(150, 300), upTo(300)), want: map[string]uint64{"b": 50}},
		"a trim that the leader does later": {before: reading(upTo(200), from(150, 200), upTo(200)),
			now: reading(from(150, 300), from(150, 300), upTo(300))},
		"two trims that it does later": {before: reading(upTo(200), from(150, 200), upTo(200)),
			now: reading(from(150, 300), from(250, 300), upTo(300))},
		"a trim that a server does later": {before: reading(from(150, 200), upTo(200), upTo(200)),
			now: reading(from(150, 300), upTo(300), from(150, 300))},
		"a server that reads no further":      {before: reading(upTo(200), upTo(120), upTo(200)), now: reading(upTo(300), upTo(120), upTo(300)), want: map[string]uint64{"b": 80}},
		"a server that is known to be behind": {before: reading(upTo(200), upTo(120), upTo(200)), now: reading(upTo(300), upTo(120), upTo(300)), behind: "b"},
		"a server that catches up": {before: reading(upTo(9000), upTo(120), upTo(9000)),
			now: reading(upTo(9900), upTo(8000), upTo(9900))},
		"a new disk":                    {before: reading(upTo(200), extent{}, upTo(200)), now: reading(upTo(300), extent{}, upTo(300)), behind: "b"},
		"a server that does not answer": {before: reading(upTo(200), without(5, upTo(200)), upTo(200)), now: extents{leader: upTo(300), servers: map[string]extent{"a": upTo(300)}}},
	} {
		t.Run(name, func(t *testing.T) {
			got := lacking(c.before, c.now, func(server string) bool { return server != c.behind })
			if diff := cmp.Diff(c.want, got); diff != "" && len(c.want)+len(got) > 0 {
				t.Errorf("servers that lack records (-want +got):\n%s", diff)
			}
		})
	}
}

// The servers of an object store are compared while it does not change; most of them are right.
func TestDiffering(t *testing.T) {
	whole, other := extent{50, 10, 90}, extent{47, 10, 90}
	for name, c := range map[string]struct {
		before, now extents
		want        map[string]uint64
	}{
		"the same":              {before: reading(whole, whole, whole), now: reading(whole, whole, whole)},
		"while it changes":      {before: reading(whole, other, whole), now: reading(upTo(99), other, whole)},
		"a moment later":        {before: reading(whole, other, whole), now: reading(whole, whole, whole)},
		"one server":            {before: reading(whole, other, whole), now: reading(whole, other, whole), want: map[string]uint64{"b": 3}},
		"the leader":            {before: reading(other, whole, whole), now: reading(other, whole, whole), want: map[string]uint64{"a": 3}},
		"all, in their own way": {before: reading(other, whole, extent{40, 10, 90}), now: reading(other, whole, extent{40, 10, 90}), want: map[string]uint64{"a": 3, "c": 10}},
		"as many, not the same": {before: reading(whole, extent{50, 9, 90}, whole), now: reading(whole, extent{50, 9, 90}, whole), want: map[string]uint64{"b": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			got := differing(c.before, c.now)
			if diff := cmp.Diff(c.want, got); diff != "" && len(c.want)+len(got) > 0 {
				t.Errorf("servers that lack messages (-want +got):\n%s", diff)
			}
		})
	}
}

// The name of a server is the one that its list of the others lacks. A stream of another account is not compared.
func TestReadExtents(t *testing.T) {
	created := time.Unix(1, 0)
	peers := func(names ...string) (list []*jetstream.PeerInfo) {
		for _, name := range names {
			list = append(list, &jetstream.PeerInfo{Name: name})
		}
		return list
	}
	stream := func(at time.Time, last uint64, others ...string) jetstream.StreamInfo {
		return jetstream.StreamInfo{
			Config: jetstream.StreamConfig{Name: "PH_test_W0"}, Created: at,
			Cluster: &jetstream.ClusterInfo{Leader: "a", Replicas: peers(others...)},
			State:   jetstream.StreamState{Msgs: last, FirstSeq: 1, LastSeq: last},
		}
	}
	server := func(streams ...jetstream.StreamInfo) (s serverState) {
		s.Accounts = append(s.Accounts, struct {
			Streams []jetstream.StreamInfo `json:"stream_detail"`
		}{streams})
		return s
	}
	leader := stream(created, 5, "b", "c")
	got := readExtents(&leader, []serverState{server(stream(created, 6, "b", "c")),
		server(stream(created.Add(1), 1, "a", "c"), stream(created, 4, "a", "c"))})
	want := map[string]extent{"a": from(1, 6), "b": from(1, 4)}
	if diff := cmp.Diff(want, got.servers, cmp.AllowUnexported(extent{})); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
}
