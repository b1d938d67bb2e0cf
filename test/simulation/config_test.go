package simulation

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
)

var namespaces = []string{"shop", "news"}

// config is the live config of a namespace. mu guards the numbers and the encoded configs.
type config struct {
	mu           sync.Mutex
	namespace    string
	destinations []*target
	deletions    []string // of users
	// redelivered is true after a redelivery: its messages count as pending at other destinations until they are read.
	redelivered atomic.Bool
	// number is that of the newest config, and known the last one that a store certainly has.
	number, known int64
	// old are the encoded configs by their numbers.
	old map[int64]liveconfig.Stored
}

// target is a destination with its newest revision.
type target struct {
	namespace, name string
	// types are the only types of calls that its filter selects, all if empty. omitted is the user whose calls have no request,
	// and dropped are the fields that are redacted.
	types   []string
	omitted string
	dropped []string
	// positions is the number of its URLs. With every, each of them must accept a message.
	positions int
	every     bool
	// state is Suspended or Paused while the destination is kept and not delivered to.
	state liveconfig.State
	// perSecond bounds the requests to a URL; 0 for no bound.
	perSecond int
	window    time.Duration
	revision  int
	// removed is when the destination was removed; zero while it exists.
	removed time.Time
	// unconfirmed is true until the newest revision is confirmed.
	unconfirmed bool
}

func newConfig(namespace string) *config {
	c := &config{namespace: namespace, old: map[int64]liveconfig.Stored{}, destinations: []*target{
		{name: "crm", positions: 2, window: time.Hour},
		{name: "people", types: []string{"identify"}, omitted: "u3", dropped: []string{"traits"}, positions: 1, window: time.Hour},
		{name: "strict", positions: 1, window: 8 * time.Second},
	}}
	for _, d := range c.destinations {
		d.namespace = namespace
	}
	return c
}

func (d *target) id() string { return d.namespace + "/" + d.name }

func (d *target) secret() string { return fmt.Sprintf("%s-secret-%d", d.id(), d.revision%3) }

// secrets are those of all revisions.
func (d *target) secrets() (all []string) {
	for n := range 3 {
		all = append(all, fmt.Sprintf("%s-secret-%d", d.id(), n))
	}
	return all
}

// reported is the revision that the owner reports; empty after a removal.
func (d *target) reported() string {
	if !d.removed.IsZero() {
		return ""
	}
	return fmt.Sprint("r", d.revision)
}

// takes reports whether the destination gets a call.
func (d *target) takes(content []byte) bool {
	return (len(d.types) == 0 || strings.Contains(string(content), `"type":"`+d.types[0])) &&
		(d.omitted == "" || !strings.Contains(string(content), strconv.Quote(d.omitted)))
}

// urls are the URLs of the newest revision.
func (d *target) urls() (all []string) {
	for position := range d.positions {
		all = append(all, fmt.Sprintf("%s%s/%d/%d", receiver, d.id(), position, d.revision))
	}
	return all
}

func (d *target) endpoints() (all []liveconfig.Endpoint) {
	for position, url := range d.urls() {
		all = append(all, liveconfig.Endpoint{Name: fmt.Sprint("e", position), URL: liveconfig.NewSecret(url),
			Headers: []liveconfig.Header{{Name: "X-Revision", Value: liveconfig.NewSecret(strconv.Itoa(d.revision))}}})
	}
	return all
}

// live returns the newest form of the destination.
func (d *target) live() liveconfig.Destination {
	l := liveconfig.Destination{
		Name: d.name, Generation: int64(d.revision + 1), Revision: fmt.Sprint("r", d.revision), Sources: []string{"web"},
		Endpoints: d.endpoints(),
		Signing:   liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(d.secret())}},
		Success:   liveconfig.AnyEndpoint,
		Delivery: liveconfig.Delivery{TimeoutMS: timeout.Milliseconds(), RetryWindowMS: d.window.Milliseconds(), MinBackoffMS: 100,
			MaxBackoffMS: 10_000, MaxInFlight: inFlight, RequestsPerSecond: d.perSecond},
		DeadLetters: liveconfig.DeadLetters{RetentionMS: (24 * time.Hour).Milliseconds(), MaxBytes: 64 << 20},
	}
	if d.every {
		l.Success = liveconfig.EveryEndpoint
	}
	if l.State = cmp.Or(d.state, liveconfig.Active); l.State == liveconfig.Paused {
		l.Endpoints = nil // They are too large.
	}
	if len(d.types) > 0 {
		l.Filter = &liveconfig.Filter{Types: d.types}
	}
	if d.omitted != "" {
		l.Request = &liveconfig.Request{Body: fmt.Sprintf("call.userId == %q ? dyn(null) : dyn(call)", d.omitted)}
		l.Redact = &liveconfig.Redact{Drop: d.dropped}
	}
	return l
}

// tombstone is what a removal leaves.
func (d *target) tombstone() liveconfig.Tombstone {
	l := d.live()
	return liveconfig.Tombstone{Object: liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: d.name}, DeletedAt: d.removed,
		Sources: l.Sources, Filter: l.Filter}
}

// stored returns a config that is older than one that the store certainly knows, if there is one, or the newest.
func (c *config) stored() (stored liveconfig.Stored, isOld bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for number, stored := range c.old {
		if number < c.known {
			return stored, true
		}
	}
	return c.old[c.number], false
}

func (c *config) newest() liveconfig.Stored {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.old[c.number]
}

// know notes that the store certainly knows a number.
func (c *config) know(number int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known = number
}

// encode makes the next config.
func (c *config) encode(t *testing.T) {
	sum := sha256.Sum256([]byte(c.namespace + "-key"))
	live := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: c.namespace, Sources: []liveconfig.Source{
		{Name: "web", Generation: 1, Revision: "1", WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}}}}
	var tombstones []liveconfig.Tombstone
	for _, d := range c.destinations {
		if d.removed.IsZero() {
			live.Destinations = append(live.Destinations, d.live())
		} else {
			tombstones = append(tombstones, d.tombstone())
		}
	}
	for n, user := range c.deletions {
		live.Deletions = append(live.Deletions, liveconfig.Deletion{Name: fmt.Sprint("d", n), Generation: 1, Revision: "1",
			ID: fmt.Sprintf("%x", sha256.Sum256([]byte(user))), UID: user, UserID: user})
	}
	slices.SortFunc(live.Deletions, func(a, b liveconfig.Deletion) int { return strings.Compare(a.Name, b.Name) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.number = max(c.number+2, time.Now().UnixMilli())
	c.old[c.number] = liveconfigtest.Numbered(t, c.number, live, tombstones...)
}
