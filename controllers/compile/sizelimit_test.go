package compile

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// testLimit replaces liveconfig.MaxEncodedBytes: it causes the same decisions with a
// sixteenth of the compression, which dominates the time under the race detector.
var testLimit = Limit{SecretBytes: liveconfig.MaxEncodedBytes / 16}

// heavy returns a destination with the given number of headers of 256 bytes each,
// which take 192 bytes when compressed.
func heavy(name string, headers int, seed uint64) v1beta1.WebhookDestination {
	random := rand.New(rand.NewPCG(seed, seed))
	d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}}
	d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "web"}}
	d.Spec.Endpoints = []v1beta1.Endpoint{{Name: "e", URL: "https://hooks.example/in"}}
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	for i := range headers {
		value := make([]byte, maxHeaderValueBytes/16)
		for j := range value {
			value[j] = letters[random.IntN(len(letters))]
		}
		text := string(value)
		e := &d.Spec.Endpoints[len(d.Spec.Endpoints)-1]
		if len(e.Headers) == maxHeaders {
			d.Spec.Endpoints = append(d.Spec.Endpoints, v1beta1.Endpoint{Name: fmt.Sprint("e", i), URL: "https://hooks.example/in"})
			e = &d.Spec.Endpoints[len(d.Spec.Endpoints)-1]
		}
		e.Headers = append(e.Headers, v1beta1.Header{Name: fmt.Sprint("X-", i), Value: &text})
	}
	return d
}

func namespaceOf(destinations ...v1beta1.WebhookDestination) Snapshot {
	web := v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: "web", Generation: 1}}
	web.Spec.WriteKeys = []v1beta1.WriteKey{{Name: "main", SecretKeyRef: v1beta1.SecretKeyReference{Name: "web", Key: "k"}}}
	return Snapshot{
		Namespace: "shop", Objects: append(pointers(destinations...), &web),
		Secrets: map[string]Secret{"web": {Version: "1", Data: map[string][]byte{"k": []byte("key")}}},
	}
}

// encode compiles and encodes, and checks the invariants of every result.
func encode(t *testing.T, s Snapshot, last *liveconfig.Config) Encoded {
	t.Helper()
	config, verdicts := table.Compile(s)
	before, _, _ := liveconfig.Encode(config)
	e, err := table.Encode(nil, config, verdicts, testLimit, func() (liveconfig.Config, bool, error) {
		if last == nil {
			return liveconfig.Config{}, false, nil
		}
		return *last, true, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if after, _, _ := liveconfig.Encode(config); !slices.Equal(before, after) {
		t.Error("Encode changed its input")
	}
	if len(e.Chunks) == 0 {
		return e
	}
	if e.Chunks.Len() > testLimit.SecretBytes {
		t.Errorf("%d bytes do not fit into %d", e.Chunks.Len(), testLimit.SecretBytes)
	}
	decoded, revision, err := liveconfig.Decode(e.Chunks.Bytes())
	if err != nil || revision != e.Revision {
		t.Errorf("the dispatcher rejects the config: %v", err)
	}
	if diff := cmp.Diff(e.Config, decoded); diff != "" {
		t.Errorf("Config differs from the decoded Chunks (-want +got):\n%s", diff)
	}
	for _, d := range decoded.Destinations {
		if v := e.Verdicts["destinations"][d.Name]; v.Revision != d.Revision || v.State != d.State {
			t.Errorf("%s: the verdict %+v does not match state %s and revision %s in the config", d.Name, v, d.State, d.Revision)
		}
	}
	return e
}

func states(e Encoded) map[string]string {
	out := map[string]string{}
	for name, v := range e.Verdicts["destinations"] {
		out[name] = string(v.State) + " " + v.Reason
	}
	return out
}

// The limit is exact: a config of limit bytes fits, and a larger one does not.
func TestEncodeLimit(t *testing.T) {
	config, verdicts := table.Compile(namespaceOf(heavy("a", 1, 1)))
	data, _, err := liveconfig.Encode(config)
	if err != nil {
		t.Fatal(err)
	}
	none := func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil }
	for limit, want := range map[int]bool{len(data): false, len(data) - 1: true} {
		e, err := table.Encode(nil, config, verdicts, Limit{SecretBytes: limit}, none)
		if err != nil || e.TooLarge != want {
			t.Errorf("config of %d bytes, limit %d: too large is %v (%v), want %v", len(data), limit, e.TooLarge, err, want)
		}
	}
}

func TestTooLargeFromTheFirstVersion(t *testing.T) {
	const active, paused = "Active Accepted", "Paused ConfigTooLarge"
	s := namespaceOf(heavy("a", 100, 1), heavy("b", 110, 2), heavy("c", 125, 3), heavy("small", 1, 4))
	e := encode(t, s, nil)
	if !e.TooLarge {
		t.Fatal("the fixture fits")
	}
	if diff := cmp.Diff(map[string]string{"a": active, "b": active, "c": paused, "small": active}, states(e)); diff != "" {
		t.Fatalf("the states, with the largest destination paused (-want +got):\n%s", diff)
	}
	web := e.Verdicts["sources"]["web"]
	if !web.Accepted || len(e.Config.Sources[0].WriteKeySHA256) == 0 {
		t.Errorf("the Source is not in effect: %+v", web)
	}
	if diff := cmp.Diff([]string{"a", "b", "small"}, web.Destinations); diff != "" {
		t.Errorf("destinations of the Source (-want +got):\n%s", diff)
	}
	if v := e.Verdicts["destinations"]["c"]; v.Accepted || !strings.Contains(v.Message, "is paused") ||
		!strings.Contains(v.Message, "remove") {
		t.Errorf("%+v", v)
	}
	again := encode(t, s, nil)
	if again.Revision != e.Revision {
		t.Error("a second call returns another result")
	}
}

func TestTooLargeKeepsWhatIsInEffect(t *testing.T) {
	const active, paused = "Active Accepted", "Paused ConfigTooLarge"
	large, larger := heavy("large", 100, 1), heavy("larger", 110, 2)
	first := encode(t, namespaceOf(large, larger), nil)
	if first.TooLarge {
		t.Fatal("the fixture does not fit")
	}
	small := heavy("small", 1, 5)
	s := namespaceOf(large, larger, heavy("new", 125, 3), small)
	e := encode(t, s, &first.Config)
	want := map[string]string{"large": active, "larger": active, "new": paused, "small": active}
	if diff := cmp.Diff(want, states(e)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	if e = encode(t, s, &e.Config); !cmp.Equal(want, states(e)) {
		t.Errorf("a second call pauses another destination: %v", states(e))
	}

	// A deleted destination and a suspended one take effect.
	yes := true
	large.Spec.Suspend = &yes
	e = encode(t, namespaceOf(large, heavy("new", 125, 3), heavy("newer", 100, 6), small), &e.Config)
	if got := states(e); strings.HasPrefix(got["large"], "Active") || got["larger"] != "" || got["small"] != active {
		t.Errorf("%v", got)
	}
}

func TestTooManyDeletionRequests(t *testing.T) {
	requests := func(prefix string, n int) (out []v1beta1.DeletionRequest) {
		random := rand.New(rand.NewPCG(1, 1))
		for i := range n {
			d := v1beta1.DeletionRequest{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%05d", prefix, i), Generation: 1}}
			d.Spec.UserID = fmt.Sprintf("%016x%016x%016x%016x", random.Uint64(), random.Uint64(), random.Uint64(), random.Uint64())
			out = append(out, d)
		}
		return out
	}
	s := namespaceOf(heavy("small", 1, 1))
	without := s.Objects
	s.Objects = append(slices.Clone(without), pointers(requests("old", 200)...)...)
	first := encode(t, s, nil)
	if first.TooLarge {
		t.Fatal("the fixture does not fit")
	}
	s.Objects = append(s.Objects, pointers(requests("new", 700)...)...)
	e := encode(t, s, &first.Config)
	if !e.TooLarge || e.Verdicts["destinations"]["small"].State != liveconfig.Active {
		t.Errorf("too large %v, small %+v", e.TooLarge, e.Verdicts["destinations"]["small"])
	}
	in, left := map[string]bool{}, 0
	for _, d := range e.Config.Deletions {
		in[d.Name] = true
	}
	for name, v := range e.Verdicts["deletions"] {
		switch {
		case strings.HasPrefix(name, "old") && !in[name]:
			t.Fatalf("%s is not in the config, so it counts as deleted", name)
		case in[name] != v.Accepted, !in[name] && (v.Reason != v1beta1.ReasonConfigTooLarge || v.State != liveconfig.Paused):
			t.Fatalf("%s: in the config %v, verdict %+v", name, in[name], v)
		case !in[name]:
			left++
		}
	}
	if left == 0 || len(in) == 200 {
		t.Errorf("%d are in the config, %d wait", len(in), left)
	}

	// If no eviction is sufficient, the last config remains; without one, calls are answered 503.
	s.Objects = slices.Clone(without)
	web := sourcesOf(&s)[0]
	for i := range 1000 {
		source := *web
		source.Name = fmt.Sprintf("source-%05d", i)
		source.CreationTimestamp = metav1.NewTime(time.Unix(int64(i), 0))
		source.Spec.WriteKeys = []v1beta1.WriteKey{{Name: "main", SecretKeyRef: v1beta1.SecretKeyReference{Name: "web", Key: source.Name}}}
		s.Secrets["web"].Data[source.Name] = []byte(source.Name)
		s.Objects = append(s.Objects, &source)
	}
	e = encode(t, s, nil)
	if e.Chunks == nil || len(e.Chunks) > 0 || e.Verdicts["sources"]["web"].Reason != v1beta1.ReasonConfigTooLarge {
		t.Errorf("without a last config: %d bytes, %+v", e.Chunks.Len(), e.Verdicts["sources"]["web"])
	}
	if _, _, err := liveconfig.Decode(e.Chunks.Bytes()); err == nil {
		t.Error("a dispatcher accepts the data as a config")
	}
	e = encode(t, s, &first.Config)
	if e.Chunks != nil || !e.Verdicts["sources"]["web"].Accepted || e.Verdicts["sources"]["source-00001"].Accepted {
		t.Errorf("with a last config: %d bytes, %+v", e.Chunks.Len(), e.Verdicts["sources"]["web"])
	}
}

// The config and its head fit into the limit together, if necessary without the routes of deleted
// destinations.
func TestEncodeWithHead(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	text := func() string { return fmt.Sprintf("%016x%016x", random.Uint64(), random.Uint64()) }
	var deleted liveconfig.Config
	uids := map[liveconfig.Ref]string{}
	for i := range 300 {
		name := fmt.Sprint("d", i)
		deleted.Destinations = append(deleted.Destinations,
			liveconfig.Destination{Name: name, Filter: &liveconfig.Filter{Events: []string{text()}}})
		uids[liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name}] = text()
	}
	withHeadOf := func(r liveconfig.Revisioned) (h History, size func(History, bool) (int, error)) {
		h, now := HistoryOf(r), time.Now()
		return h, func(h History, exact bool) (int, error) {
			return h.HeadBytes(exact, Present{UIDs: r.Head.UIDs}, Dispatchers{}, now, TombstoneGrace)
		}
	}
	none, noneSize := withHeadOf(liveconfig.Revisioned{})
	dead, deadSize := withHeadOf(liveconfig.Revisioned{Config: deleted})
	large, largeSize := withHeadOf(liveconfig.Revisioned{Head: liveconfig.Head{Number: 1, UIDs: uids}})
	config, verdicts := table.Compile(namespaceOf(heavy("a", 10, 1), heavy("b", 250, 2)))
	data, _, err := liveconfig.Encode(config)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		history  History
		size     func(History, bool) (int, error)
		spare    int // bytes beside the config
		tooLarge bool
		routes   bool
	}{
		"small head":                         {none, noneSize, 2 << 10, false, false},
		"tombstones that fit":                {dead, deadSize, 30 << 10, false, true},
		"tombstones that fit without routes": {dead, deadSize, 5 << 10, false, false},
		"UIDs that do not fit":               {large, largeSize, 3 << 10, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			limit := len(data) + c.spare
			encoded, history, err := table.EncodeWithHead(nil, config, verdicts, Limit{SecretBytes: limit}, c.history, c.size,
				func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil })
			if err != nil || encoded.Chunks == nil || encoded.TooLarge != c.tooLarge {
				t.Fatalf("error %v, %d bytes, too large: got %t, want %t", err, encoded.Chunks.Len(), encoded.TooLarge, c.tooLarge)
			}
			existing := map[liveconfig.Ref]string(nil)
			if c.tooLarge {
				existing = uids
			}
			head, _ := history.Next(encoded.Revision, Present{UIDs: existing}, Dispatchers{}, time.Now(), TombstoneGrace)
			text, err := liveconfig.EncodeHead(head)
			if err != nil || encoded.Chunks.Len()+len(text) > limit {
				t.Errorf("error %v, %d and %d bytes do not fit into %d", err, encoded.Chunks.Len(), len(text), limit)
			}
			if got := len(head.Tombstones) > 0 && head.Tombstones[0].Filter != nil; got != c.routes {
				t.Errorf("tombstones with routes: got %t, want %t", got, c.routes)
			}
		})
	}
}
