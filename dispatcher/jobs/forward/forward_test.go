package forward_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/jobs/forward"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

// rig runs a delivery engine and a Service on a real store, in virtual time.
type rig struct {
	*testing.T
	files vfs.FS
	store *pebblestore.Store
	// fault replaces the Service's writes; nil for none.
	fault *faults

	gate    *admission.Gate
	engine  *delivery.Engine
	service *forward.Service
	config  liveconfig.Config
	number  int
	end     func()

	mu sync.Mutex
	// status is the answer of each host; 200 without an entry.
	status map[string]int
	// rejected are the messageIds that a host answers by 422.
	rejected map[string][]string
	got      map[string][]received
	hosts    map[*egress.Endpoint]string
}

type received struct {
	id, body string
	at       time.Time
}

// run runs a test in virtual time, with destinations that forward their dead letters to others.
func run(t *testing.T, destinations []liveconfig.Destination, test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{T: t, files: vfs.NewMem(), status: map[string]int{}, got: map[string][]received{}, hosts: map[*egress.Endpoint]string{}}
		r.config = liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop", Sources: []liveconfig.Source{{Name: "web"}},
			Destinations: destinations}
		r.start()
		test(r)
		r.stop()
	})
}

// to returns a destination with one endpoint.
func to(name, forwardTo string, sources ...string) liveconfig.Destination {
	return liveconfig.Destination{
		Name: name, Revision: "1", State: liveconfig.Active, Sources: sources, Success: liveconfig.AnyEndpoint,
		Endpoints:   []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret("https://" + name)}},
		Delivery:    liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: 60_000, MinBackoffMS: 1000, MaxBackoffMS: 1000, MaxInFlight: 8},
		DeadLetters: liveconfig.DeadLetters{RetentionMS: time.Hour.Milliseconds(), MaxBytes: 1 << 30, ForwardTo: forwardTo},
	}
}

// start starts a process on the files.
func (r *rig) start() {
	r.Helper()
	var err error
	log := slog.New(slog.DiscardHandler)
	r.store, err = pebblestore.Open("queue", pebblestore.Options{FS: r.files, Logger: log, Now: time.Now, MaintainInterval: time.Hour})
	check.NoError(r.T, "open the store", err)
	r.gate = admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: func(ctx context.Context,
		m []queue.Message) ([]bool, error) {
		if r.fault.fails("append", m[0].Source) {
			return nil, queue.ErrFull
		}
		return r.store.Append(ctx, m)
	}}, Logger: log})
	r.service, err = forward.New(forward.Options{Gate: r.gate, Store: faultyStore{r.store, r.fault}, Logger: log})
	check.NoError(r.T, "make the Service", err)
	r.engine = delivery.New(delivery.Options{Store: r.store, Client: (*poster)(r), Logger: log})
	r.apply()
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { _ = r.engine.Run(ctx) })
	group.Go(func() { _ = r.service.Run(ctx) })
	r.end = func() {
		cancel()
		group.Wait()
	}
}

func (r *rig) stop() {
	r.Helper()
	r.end()
	check.NoError(r.T, "close the store", r.store.Close())
}

// apply puts the config into effect.
func (r *rig) apply() {
	r.Helper()
	r.number++
	config := r.config
	config.Destinations = slices.Clone(config.Destinations) // A view is immutable.
	view := liveconfig.NewView([]liveconfig.Revisioned{{Config: config, Revision: fmt.Sprint(r.number)}})
	check.NoError(r.T, "apply the positions", r.service.Apply(view))
	check.NoError(r.T, "apply the config", r.engine.Apply(view))
	admissiontest.Set(r.gate, view, nil)
}

// send appends calls with the ids from first to last.
func (r *rig) send(first, last int) {
	r.Helper()
	for i := first; i <= last; i++ {
		id := fmt.Sprint("m", i)
		_, err := appendTo(r.Context(), r.gate, []queue.Message{{
			Source: "shop/web", ID: id, Type: "track", Event: "Order", AcceptedAt: time.Now(),
			Body: fmt.Appendf(nil, `{"type":"track","messageId":%q,"properties":{"name":"<b>"}}`, id),
		}})
		check.NoError(r.T, "append", err)
	}
}

// wait lets virtual time pass.
func (r *rig) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// accepted returns the requests that a host accepted, by the messageId in the body.
func (r *rig) accepted(host string) map[string][]received {
	r.mu.Lock()
	defer r.mu.Unlock()
	byID := map[string][]received{}
	for _, m := range r.got[host] {
		var fields struct {
			MessageID string `json:"messageId"`
		}
		check.NoError(r.T, "decode a body", json.Unmarshal([]byte(m.body), &fields))
		byID[fields.MessageID] = append(byID[fields.MessageID], m)
	}
	return byID
}

func (r *rig) answer(host string, status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status[host] = status
}

func (r *rig) reject(host string, ids ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rejected = map[string][]string{host: ids}
}

// ledger checks that a destination's ledger balances, and returns it.
func (r *rig) ledger(name string) queue.Ledger {
	r.Helper()
	l := r.store.DestinationStats("shop/" + name).Ledger
	check.NoError(r.T, "ledger of "+name, l.Balance())
	return l
}

// poster is the network of a rig.
type poster rig

func (p *poster) Prepare(e liveconfig.Endpoint) (*egress.Endpoint, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	prepared := &egress.Endpoint{}
	p.hosts[prepared] = strings.TrimPrefix(e.URL.Reveal(), "https://")
	return prepared, nil
}

func (p *poster) Forget(*egress.Endpoint) {}

func (p *poster) Post(_ context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result {
	time.Sleep(time.Millisecond)
	p.mu.Lock()
	defer p.mu.Unlock()
	host := p.hosts[e]
	status := p.status[host]
	if slices.ContainsFunc(p.rejected[host], func(id string) bool { return bytes.Contains(body, fmt.Appendf(nil, "%q", id)) }) {
		status = 422
	}
	if status != 0 {
		return egress.Result{StatusCode: status, Reason: reasons[status], Message: "status", Sent: true}
	}
	p.got[host] = append(p.got[host], received{headers[0].Value, string(body), time.Now()})
	return egress.Result{StatusCode: 200, Sent: true}
}

// reasons has the reason of each status in the tests.
var reasons = map[int]egress.Reason{422: egress.Rejected, 500: egress.ServerError}

// faults are writes of the Service that fail.
type faults struct {
	mu sync.Mutex
	// write is "append" or "put"; from its n-th call on, everything fails.
	write string
	n     int
	dead  bool
}

func (f *faults) fails(write, source string) bool {
	if f == nil || source != "" && !strings.HasSuffix(source, "/"+liveconfig.SourceDeadLetters) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if write == f.write {
		if f.n--; f.n == 0 {
			f.dead = true
		}
	}
	return f.dead
}

type faultyStore struct {
	*pebblestore.Store
	faults *faults
}

func (s faultyStore) PutMetaDurable(name string, value []byte) error {
	if s.faults.fails("put", "") {
		return errors.New("killed")
	}
	return s.Store.PutMetaDurable(name, value)
}

var pair = []liveconfig.Destination{to("crm", "ops", "web"), to("ops", "", liveconfig.SourceDeadLetters)}

// A dead letter is sent to the target within seconds, with the original fields and the details, and
// is kept.
func TestForwards(t *testing.T) {
	run(t, pair, func(r *rig) {
		r.answer("crm", 422)
		r.send(1, 3)
		r.wait(5 * time.Second)
		got := r.accepted("ops")
		check.Equal(r.T, "messages at the target", len(got), 3)
		check.Equal(r.T, "requests at the target", len(r.got["ops"]), 3)
		m := got["m1"][0]
		const original = `{"type":"track","messageId":"m1","properties":{"name":"<b>"},"deadLetter":{`
		check.Equal(r.T, "body starts with the original body", strings.HasPrefix(m.body, original), true)
		var body struct {
			DeadLetter forward.Details `json:"deadLetter"`
		}
		check.NoError(r.T, "decode the body", json.Unmarshal([]byte(m.body), &body))
		d := body.DeadLetter
		check.Equal(r.T, "accepted in the past", !d.AcceptedAt.After(d.FailedAt) && d.FailedAt.Before(m.at), true)
		d.AcceptedAt, d.FailedAt = time.Time{}, time.Time{}
		check.Equal(r.T, "details", d, forward.Details{Destination: "crm", Source: "web", Reason: "Rejected", StatusCode: 422, Message: "status",
			Attempts: 1})
		check.Equal(r.T, "id is one of its own", strings.HasPrefix(m.id, "dead-letter-") && len(m.id) == len("dead-letter-")+32, true)
		check.Equal(r.T, "forwarded", r.service.Forwarded("shop", "crm"), 3)
		check.Equal(r.T, "ledger of crm", r.ledger("crm"), queue.Ledger{Accepted: 3, DeadLettered: 3})
		check.Equal(r.T, "ledger of ops", r.ledger("ops"), queue.Ledger{Accepted: 3, Delivered: 3})
		check.Equal(r.T, "stored dead letters", r.store.DestinationStats("shop/crm").DeadLetters, 3)
	})
}

// A dead letter is forwarded as it may be shown: redacted by the rules at its death and the present ones.
func TestForwardsRedacted(t *testing.T) {
	crm := to("crm", "ops", "web")
	crm.Redact = &liveconfig.Redact{Mask: []string{"properties.name"}}
	run(t, []liveconfig.Destination{crm}, func(r *rig) {
		r.answer("crm", 422)
		r.send(1, 1)
		r.wait(5 * time.Second)
		crm.Redact = &liveconfig.Redact{Drop: []string{"properties.other"}}
		r.config.Destinations = []liveconfig.Destination{crm, pair[1]}
		r.apply()
		r.wait(time.Minute)
		const want = `{"type":"track","messageId":"m1","properties":{"name":"***"},"deadLetter":{`
		if body := r.accepted("ops")["m1"][0].body; !strings.HasPrefix(body, want) {
			t.Errorf("body: got %s, want it to begin with %s", body, want)
		}
	})
}

// Only dead letters that are made while the config requests it are forwarded.
func TestStartsAtTheConfig(t *testing.T) {
	run(t, []liveconfig.Destination{to("crm", "", "web"), pair[1]}, func(r *rig) {
		r.answer("crm", 422)
		r.send(1, 2)
		r.wait(5 * time.Second)
		r.config.Destinations = pair
		r.apply()
		r.send(3, 4)
		r.wait(5 * time.Second)
		got := r.accepted("ops")
		check.Equal(r.T, "m1 was forwarded", len(got["m1"]), 0)
		check.Equal(r.T, "m3 was forwarded", len(got["m3"]), 1)
		check.Equal(r.T, "forwarded", r.service.Forwarded("shop", "crm"), 2)

		r.config.Destinations = []liveconfig.Destination{to("crm", "", "web"), pair[1]}
		r.apply()
		r.wait(2 * time.Second)
		r.send(5, 5)
		r.wait(5 * time.Second)
		check.Equal(r.T, "m5 was forwarded", len(r.accepted("ops")["m5"]), 0)
		values, err := r.store.AllMeta()
		check.NoError(r.T, "read the positions", err)
		check.Equal(r.T, "position is removed", values["forward/shop/crm"] == nil, true)
	})
}

// A forwarded message that becomes a dead letter again is not forwarded again, also if its destination
// forwards by then.
func TestOneHop(t *testing.T) {
	run(t, append(slices.Clone(pair), to("archive", "", liveconfig.SourceDeadLetters)), func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		r.answer("ops", 500)
		r.send(1, 5)
		r.wait(5 * time.Second)
		check.Equal(r.T, "pending at ops", r.ledger("ops").Pending, 5)
		r.config.Destinations[1] = to("ops", "archive", "web", liveconfig.SourceDeadLetters)
		r.apply()
		r.wait(2 * time.Second)
		r.send(6, 7)
		r.wait(time.Hour / 2)
		// Two calls and five dead letters of crm. The dead letters of the calls are forwarded.
		check.Equal(r.T, "ledger of ops", r.ledger("ops"), queue.Ledger{Accepted: 7, DeadLettered: 7})
		check.Equal(r.T, "forwarded from ops", r.service.Forwarded("shop", "ops"), 2)
		check.Equal(r.T, "forwarded from crm", r.service.Forwarded("shop", "crm"), 5)
		check.Equal(r.T, "ledger of archive", r.ledger("archive"), queue.Ledger{Accepted: 2, Delivered: 2})
	})
}

// A target that rejects some messages of a page delays none of the others, and a target that cannot
// get any delays no other destination.
func TestPartialFailure(t *testing.T) {
	run(t, append([]liveconfig.Destination{to("erp", "missing", "web")}, pair...), func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		r.answer("erp", 422)
		r.reject("ops", "m2", "m5")
		r.send(1, 6)
		r.wait(10 * time.Second)
		check.Equal(r.T, "ledger of ops", r.ledger("ops"), queue.Ledger{Accepted: 6, Delivered: 4, DeadLettered: 2})
		check.Equal(r.T, "forwarded from crm", r.service.Forwarded("shop", "crm"), 6)
		check.Equal(r.T, "forwarded from erp", r.service.Forwarded("shop", "erp"), 0)
		// The dead letters of erp are sent when its target exists, the dead letters of ops never.
		r.config.Destinations = append(r.config.Destinations, to("missing", "", liveconfig.SourceDeadLetters))
		r.apply()
		r.wait(2 * time.Minute)
		check.Equal(r.T, "forwarded from erp", r.service.Forwarded("shop", "erp"), 6)
		check.Equal(r.T, "ledger of missing", r.ledger("missing"), queue.Ledger{Accepted: 6, Delivered: 6})
		check.Equal(r.T, "ledger of ops", r.ledger("ops"), queue.Ledger{Accepted: 6, Delivered: 4, DeadLettered: 2})
	})
}

// Destinations that forward to each other forward nothing: their dead letters wait.
func TestCycle(t *testing.T) {
	run(t, []liveconfig.Destination{to("crm", "ops", "web", liveconfig.SourceDeadLetters),
		to("ops", "crm", "web", liveconfig.SourceDeadLetters)}, func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		r.answer("ops", 422)
		r.send(1, 5)
		r.wait(time.Hour / 2)
		for _, name := range []string{"crm", "ops"} {
			check.Equal(r.T, "ledger of "+name, r.ledger(name), queue.Ledger{Accepted: 5, DeadLettered: 5})
		}
	})
}

// Dead letters wait for a target that does not exist, or does not get them, also across a restart.
func TestWaitsForItsTarget(t *testing.T) {
	run(t, pair[:1], func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		r.send(1, 2)
		r.wait(5 * time.Second)
		r.config.Destinations = []liveconfig.Destination{pair[0], to("ops", "", "web")}
		r.apply()
		r.wait(2 * time.Minute)
		check.Equal(r.T, "forwarded without a target", r.service.Forwarded("shop", "crm"), 0)
		r.stop()
		r.start()
		r.wait(5 * time.Second)
		r.config.Destinations = pair
		r.apply()
		r.wait(2 * time.Minute)
		check.Equal(r.T, "messages at the target", len(r.accepted("ops")), 2)
		check.Equal(r.T, "forwarded", r.service.Forwarded("shop", "crm"), 2)
	})
}

// A missing config keeps the position, so that no dead letter is missed.
func TestParkedDestinationKeepsItsPosition(t *testing.T) {
	run(t, pair, func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		r.send(1, 1)
		r.wait(5 * time.Second)
		view := liveconfig.NewView(nil, "shop")
		check.NoError(r.T, "apply the positions", r.service.Apply(view))
		check.NoError(r.T, "apply the config", r.engine.Apply(view))
		admissiontest.Set(r.gate, view, nil)
		r.wait(5 * time.Second)
		r.apply()
		r.send(2, 2)
		r.wait(5 * time.Second)
		check.Equal(r.T, "forwarded", r.service.Forwarded("shop", "crm"), 2)
		check.Equal(r.T, "requests at the target", len(r.got["ops"]), 2)
	})
}

// A process that ends before or after any write forwards every dead letter, at most one page of them
// twice.
func TestKilled(t *testing.T) {
	const calls = 250
	for _, write := range []string{"append", "put"} {
		for n := 1; n <= 3; n++ {
			t.Run(fmt.Sprint(write, n), func(t *testing.T) {
				run(t, pair, func(r *rig) {
					r.wait(2 * time.Second)
					r.stop()
					r.fault = &faults{write: write, n: n}
					r.start()
					r.answer("crm", 422)
					r.send(1, calls)
					r.wait(3 * time.Minute) // The circuit opens, and the rest expires.
					r.stop()
					check.Equal(r.T, "the fault occurred", r.fault.dead, true)
					r.fault = nil
					r.start()
					r.wait(2 * time.Minute)
					got := r.accepted("ops")
					check.Equal(r.T, "messages at the target", len(got), calls)
					repeated := 0
					for id, all := range got {
						repeated += len(all) - 1
						for _, m := range all {
							check.Equal(r.T, "id of "+id, m.id, all[0].id)
						}
					}
					if repeated > 100 {
						r.Errorf("repeated messages: got %d, want at most a page of 100", repeated)
					}
					check.Equal(r.T, "forwarded", r.service.Forwarded("shop", "crm"), calls)
					check.Equal(r.T, "accepted by the target", r.ledger("ops").Accepted, int64(calls+repeated))
				})
			})
		}
	}
}

// Dead letters that cannot be appended wait, and are retried with backoff.
func TestFullQueue(t *testing.T) {
	run(t, pair, func(r *rig) {
		r.wait(2 * time.Second)
		r.stop()
		r.fault = &faults{write: "append", n: 1}
		r.start()
		r.answer("crm", 422)
		r.send(1, 10)
		r.wait(10 * time.Minute)
		r.fault.mu.Lock()
		attempts := -r.fault.n
		r.fault.dead = false
		r.fault.mu.Unlock()
		if attempts < 9 || attempts > 20 {
			r.Errorf("attempts in ten minutes: got %d, want 9 to 20, with backoff", attempts)
		}
		r.wait(2 * time.Minute)
		check.Equal(r.T, "messages at the target", len(r.accepted("ops")), 10)
	})
}

// A field of a client with the name of the details is replaced.
func TestFieldOfAClient(t *testing.T) {
	run(t, pair, func(r *rig) {
		r.wait(2 * time.Second)
		r.answer("crm", 422)
		_, err := appendTo(r.Context(), r.gate, []queue.Message{{Source: "shop/web", ID: "m", Type: "track", AcceptedAt: time.Now(), Body: []byte(`{"deadLetter":{"destination":"forged"},"messageId":"m","n":1.5,"t":"<"}`)}})
		check.NoError(r.T, "append", err)
		r.wait(5 * time.Second)
		body := r.accepted("ops")["m"][0].body
		check.Equal(r.T, "start of the body", body[:min(len(body), 73)], `{"messageId":"m","n":1.5,"t":"<","deadLetter":{"destination":"crm","sourc`)
		check.Equal(r.T, "fields with the details", strings.Count(body, `"deadLetter"`), 1)
	})
}

func appendTo(ctx context.Context, gate *admission.Gate, msgs []queue.Message) (duplicates []bool, err error) {
	routing := gate.Begin()
	defer routing.End()
	return routing.Append(ctx, msgs)
}
