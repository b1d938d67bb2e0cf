package notices_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/intake/route"
	"github.com/posthorn/posthorn/dispatcher/jobs/notices"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
)

// rig runs a Service on given reports, in virtual time.
type rig struct {
	*testing.T
	// mu protects report, version, reports, got, fail and used, which the test changes beside the Service.
	mu      sync.Mutex
	config  liveconfig.Config
	report  adminapi.Report
	version int
	reports int
	meta    *meta
	gate    *admission.Gate
	got     []queue.Message
	// fail are the errors of Append, by Source.
	fail map[string]error
	// used are the used thousandths of the disk; negative if they are unknown.
	used int
	stop func()
}

// meta is a notices.Store in memory, which outlives a process.
type meta struct {
	mu     sync.Mutex
	values map[string][]byte
	writes int
	// deadLettered counts the dead letters of each destination, also of deleted ones.
	deadLettered map[string]int64
}

func (m *meta) DestinationStats(destination string) (s queue.DestinationStats) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.Ledger.DeadLettered = m.deadLettered[destination]
	return s
}

func (m *meta) PutMetaDurable(name string, value []byte) error { return m.PutMeta(name, value) }

func (m *meta) AllMeta() (map[string][]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.values), nil
}

func (m *meta) PutMeta(name string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.writes++
	if value == nil {
		delete(m.values, name)
		return nil
	}
	m.values[name] = value
	return nil
}

// written returns the number of writes.
func (m *meta) written() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.writes
}

func run(t *testing.T, test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{T: t, meta: &meta{values: map[string][]byte{}}, fail: map[string]error{}}
		r.config = liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop",
			Sources: []liveconfig.Source{{Name: "web"}}, Destinations: []liveconfig.Destination{
				destination("crm", "web"), destination("ops", liveconfig.SourceNotices),
			}}
		r.report = adminapi.Report{Namespaces: []adminapi.NamespaceReport{{
			Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web"}},
			Destinations: []adminapi.DestinationReport{{Name: "crm", Endpoints: endpoints("primary")},
				{Name: "ops", Endpoints: endpoints("primary")}},
		}}}
		r.start()
		test(r)
		r.stop()
	})
}

func destination(name, source string) liveconfig.Destination {
	return liveconfig.Destination{
		Name: name, State: liveconfig.Active, Sources: []string{source}, Success: liveconfig.AnyEndpoint,
		Endpoints: []liveconfig.Endpoint{{Name: "primary"}}, Delivery: liveconfig.Delivery{RetryWindowMS: (4 * time.Hour).Milliseconds()},
	}
}

func endpoints(names ...string) (list []adminapi.EndpointReport) {
	for _, name := range names {
		list = append(list, adminapi.EndpointReport{Name: name, State: adminapi.EndpointHealthy})
	}
	return list
}

// start starts a process.
func (r *rig) start() {
	r.Helper()
	r.gate = admission.New(admission.Options{Store: &admissiontest.Store{OnAppend: func(_ context.Context, m []queue.Message) ([]bool, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if err := r.fail[m[0].Source]; err != nil {
			return nil, err
		}
		r.got = append(r.got, m...)
		return nil, nil
	}}, HighWater: 0.9, Logger: slog.New(slog.DiscardHandler)})
	r.apply()
	s, err := notices.New(notices.Options{Gate: r.gate, Store: r.meta, Pod: "pod-0", Namespace: "shop",
		DiskLeft: func() (left, total float64, ok bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			return float64(900 - r.used), 1000, r.used >= 0
		}, Logger: slog.New(slog.DiscardHandler), Changes: func(cursor string) *adminapi.Report {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.reports++
			if cursor == fmt.Sprint(r.version) {
				return nil
			}
			// A copy, as from a real dispatcher.
			text, err := json.Marshal(r.report)
			var report adminapi.Report
			if err := errors.Join(err, json.Unmarshal(text, &report)); err != nil {
				panic(err)
			}
			report.Cursor = fmt.Sprint(r.version)
			return &report
		}})
	check.NoError(r.T, "make the Service", err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r.stop = func() {
		cancel()
		check.NoError(r.T, "Run", <-done)
	}
}

func (r *rig) apply() {
	r.Helper()
	router, err := route.New(r.config)
	check.NoError(r.T, "make the router", err)
	admissiontest.Set(r.gate, liveconfig.NewView([]liveconfig.Revisioned{{Config: r.config}}), router)
}

// change changes the report.
func (r *rig) change(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	r.version++
}

// taken returns the messages that were sent since the last call.
func (r *rig) taken() []queue.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	got := r.got
	r.got = nil
	return got
}

// after changes the report, lets time pass, and checks the events that were sent since the last call.
func (r *rig) after(d time.Duration, change func(), want ...string) []queue.Message {
	r.Helper()
	if change != nil {
		r.change(change)
	}
	time.Sleep(d)
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	var events []string
	for _, m := range r.got {
		check.Equal(r.T, "Source", m.Source, "shop/posthorn-notices")
		check.Equal(r.T, "type", m.Type, "track")
		events = append(events, m.Event)
	}
	check.Equal(r.T, "notices", strings.Join(events, ", "), strings.Join(want, ", "))
	got := r.got
	r.got = nil
	return got
}

// records returns the names of the stored records.
func (r *rig) records() string {
	values, _ := r.meta.AllMeta()
	return strings.ReplaceAll(strings.Join(slices.Sorted(maps.Keys(values)), ", "), "notices/shop/", "")
}

func (r *rig) web() *adminapi.SourceReport { return &r.report.Namespaces[0].Sources[0] }

func (r *rig) crm() *adminapi.DestinationReport { return &r.report.Namespaces[0].Destinations[0] }

func (r *rig) circuit(state adminapi.EndpointState) func() {
	return func() { r.crm().Endpoints[0].State = state }
}

// properties returns the properties of a notice, which is a message of the documented form.
func (r *rig) properties(m queue.Message) (p notices.Properties) {
	r.Helper()
	var body struct {
		Type, Event, MessageID, AnonymousID string
		Properties                          *notices.Properties
	}
	check.NoError(r.T, "decode a notice", json.Unmarshal(m.Body, &body))
	check.Equal(r.T, "fields", fmt.Sprint(body.Type, body.Event, body.MessageID, body.AnonymousID), fmt.Sprint("track", m.Event, m.ID, "posthorn"))
	check.Equal(r.T, "pod", body.Properties.Pod, "pod-0")
	return *body.Properties
}

func TestCircuit(t *testing.T) {
	run(t, func(r *rig) {
		r.after(time.Minute, nil)
		got := r.after(time.Minute, func() {
			r.circuit(adminapi.EndpointCircuitOpen)()
			r.crm().Endpoints[0].LastFailure = &adminapi.Failure{Reason: "TimedOut", Message: "no answer"}
		}, notices.CircuitOpened)
		p := r.properties(got[0])
		check.Equal(r.T, "properties", fmt.Sprint(p.Destination, p.Endpoint, p.Reason, p.Message), "crmprimaryTimedOutno answer")
		// A short recovery is not reported, and neither are further states of an open circuit.
		r.after(time.Minute, r.circuit(adminapi.EndpointHealthy))
		r.after(time.Hour, r.circuit(adminapi.EndpointGone))
		r.after(time.Minute, r.circuit(adminapi.EndpointHealthy), notices.CircuitClosed)
		// A circuit that changes all the time makes at most one notice every five minutes.
		for i := range 360 {
			r.change(r.circuit([]adminapi.EndpointState{adminapi.EndpointCircuitOpen, adminapi.EndpointHealthy}[i%2]))
			time.Sleep(10 * time.Second)
		}
		synctest.Wait()
		if n := len(r.taken()); n < 1 || n > 12 {
			r.Errorf("notices about a flapping circuit in an hour: got %d, want 1 to 12", n)
		}
	})
}

// The destination that gets the notices causes none.
func TestNoLoop(t *testing.T) {
	run(t, func(r *rig) {
		r.after(24*time.Hour, func() {
			ops := &r.report.Namespaces[0].Destinations[1]
			ops.Endpoints[0].State, ops.DeadLettered, ops.OldestPending = adminapi.EndpointCircuitOpen, 5, time.Now()
			r.report.Configs = []adminapi.ConfigReport{{Namespace: "shop", Discards: []adminapi.Discard{{Source: liveconfig.SourceNotices, Destination: "gone", Messages: 3, At: time.Now()}}}}
		})
	})
}

// A destination that gets the notices that failed, as forwarded dead letters, causes none.
func TestNoLoopOverForwardedNotices(t *testing.T) {
	run(t, func(r *rig) {
		r.config.Destinations = slices.Clone(r.config.Destinations)
		r.config.Destinations[1].DeadLetters.ForwardTo = "crm"
		r.apply()
		r.after(2*time.Hour, func() {
			r.circuit(adminapi.EndpointCircuitOpen)()
			r.crm().DeadLettered = 3
		})
		r.config.Destinations = slices.Clone(r.config.Destinations)
		r.config.Destinations[1].DeadLetters.ForwardTo = ""
		r.apply()
		r.after(time.Minute, nil, notices.CircuitOpened, notices.DeadLetters)
	})
}

func TestDeadLetters(t *testing.T) {
	run(t, func(r *rig) {
		r.after(time.Minute, nil)
		got := r.after(time.Minute, func() { r.crm().DeadLettered = 2 }, notices.DeadLetters)
		check.Equal(r.T, "messages", r.properties(got[0]).Messages, 2)
		r.after(30*time.Minute, func() { r.crm().DeadLettered = 7 })
		got = r.after(time.Hour, nil, notices.DeadLetters)
		check.Equal(r.T, "messages", r.properties(got[0]).Messages, 5)
		r.after(24*time.Hour, nil)
	})
}

func TestRetryWindow(t *testing.T) {
	run(t, func(r *rig) {
		r.after(2*time.Hour+59*time.Minute, func() {
			r.crm().OldestPending, r.crm().OldestExpires, r.crm().Pending = time.Now(), time.Now().Add(4*time.Hour), 9
		})
		got := r.after(2*time.Minute, nil, notices.RetryWindowEnding)
		p := r.properties(got[0])
		check.Equal(r.T, "window", p.Until.Sub(*p.Since), 4*time.Hour)
		check.Equal(r.T, "messages", p.Messages, 9)
		r.after(time.Minute, func() { r.crm().OldestExpires = time.Time{} }) // It is suspended.
		r.after(10*time.Hour, nil)
		r.after(time.Minute, func() { r.crm().OldestExpires = time.Now().Add(time.Minute) }, notices.RetryWindowEnding)
	})
}

func TestDisk(t *testing.T) {
	run(t, func(r *rig) {
		used := func(n int) func() {
			return func() { r.used = n }
		}
		r.after(time.Minute, used(800)) // 89 % of the high-water mark.
		got := r.after(time.Minute, used(820), notices.DiskNearlyFull)
		check.Equal(r.T, "used", r.properties(got[0]).UsedPercent, 82)
		r.after(time.Minute, used(790))
		r.after(time.Minute, used(850))
		r.after(time.Minute, used(-1)) // Unknown.
		r.after(time.Minute, used(850))
		r.after(time.Minute, used(500))
		r.after(time.Minute, used(850), notices.DiskNearlyFull)
	})
}

func TestDiscard(t *testing.T) {
	run(t, func(r *rig) {
		discard := func(messages int64) func() {
			at := time.Now().Truncate(time.Hour).Add(2 * time.Hour)
			return func() {
				r.report.Configs = []adminapi.ConfigReport{{Namespace: "shop",
					Discards: []adminapi.Discard{{Source: "web", Destination: "gone", Messages: messages, At: at}}}}
			}
		}
		r.after(time.Minute, discard(0))
		got := r.after(time.Minute, discard(3), notices.DiscardAhead)
		p := r.properties(got[0])
		check.Equal(r.T, "properties", fmt.Sprint(p.Source, p.Destination, p.Messages), "webgone3")
		r.after(time.Minute, discard(2))
	})
}

// A Source without calls for a day has a notice, if the pod observed a call before. Its destinations
// have none.
func TestNoTraffic(t *testing.T) {
	run(t, func(r *rig) {
		calls := func(n int64) func() {
			return func() {
				r.web().Accepted += n
				r.crm().Accepted, r.crm().Delivered = r.web().Accepted, r.web().Accepted
			}
		}
		// All calls are of the time before the subscription: the first report of the Service has them.
		r.stop()
		clear(r.meta.values)
		r.change(calls(100))
		r.start()
		r.after(48*time.Hour, nil)
		// A call each day, at any time of it, is traffic.
		for range 3 {
			r.after(23*time.Hour, calls(1))
		}
		last := time.Now().Add(-23 * time.Hour)
		r.after(59*time.Minute, nil)
		p := r.properties(r.after(2*time.Hour, nil, notices.NoTraffic)[0])
		check.Equal(r.T, "properties", fmt.Sprint(p.Source, " ", p.Destination, p.Messages), "web 0")
		if late := p.Since.Sub(last); late < 0 || late > time.Hour+time.Minute {
			r.Errorf("since: got %v after the last call, want at most an hour", late)
		}
		r.after(30*time.Hour, nil)
		// A new call makes it observed again, and a burst of calls makes few records.
		writes := r.meta.written()
		for range 600 {
			r.change(calls(1))
			time.Sleep(time.Minute)
		}
		if n := r.meta.written() - writes; n < 10 || n > 40 {
			r.Errorf("writes in 10 hours: got %d, want 10 to 40", n)
		}
		r.after(26*time.Hour, nil, notices.NoTraffic)
	})
}

// A destination whose filter excludes all calls for a day has a notice with their number.
func TestNoTrafficOfADestination(t *testing.T) {
	run(t, func(r *rig) {
		deliver := func() { r.web().Accepted++; r.crm().Accepted++; r.crm().Delivered++ }
		exclude := func() { r.web().Accepted++; r.crm().Accepted++; r.crm().Filtered++ }
		r.after(2*time.Hour, exclude) // Nothing was delivered yet.
		r.after(2*time.Hour, deliver)
		for range 21 {
			r.after(time.Hour, exclude)
		}
		p := r.properties(r.after(2*time.Hour, exclude, notices.NoTraffic)[0])
		check.Equal(r.T, "properties", fmt.Sprint(p.Source, p.Destination, " ", p.Messages), "crm 22")
		for range 48 {
			r.after(time.Hour, exclude)
		}
	})
}

// A pod that was down waits for calls before it reports that there are none, and a suspended Source is
// silent.
func TestNoTrafficWhileNoCallsCanArrive(t *testing.T) {
	run(t, func(r *rig) {
		call := func() { r.web().Accepted++ }
		observe := func() {
			r.Helper()
			r.after(time.Minute, nil)
			r.after(2*time.Hour, call)
		}
		observe()
		r.stop()
		time.Sleep(30 * time.Hour)
		r.start()
		r.after(50*time.Minute, nil)
		r.after(30*time.Hour, call, notices.NoTraffic)
		r.after(2*time.Hour, call)
		r.stop()
		time.Sleep(30 * time.Hour)
		r.start()
		r.after(2*time.Hour, nil, notices.NoTraffic)

		suspend := func(suspended bool) {
			r.config.Sources = []liveconfig.Source{{Name: "web", Suspended: suspended}}
			r.apply()
		}
		observe()
		suspend(true)
		r.after(30*time.Hour, nil)
		suspend(false)
		r.after(30*time.Hour, nil)
		observe()
		r.after(24*time.Hour, nil, notices.NoTraffic)
		observe()
		r.config.Sources = nil
		r.apply()
		r.after(30*time.Hour, nil)
		check.Equal(r.T, "records after the deletion of the Source", r.records(), "messages/crm")
	})
}

// Only subscribed namespaces cost anything, and a filter selects notices.
func TestSubscription(t *testing.T) {
	run(t, func(r *rig) {
		r.config.Destinations = r.config.Destinations[:1]
		r.apply()
		time.Sleep(time.Minute)
		reports := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.reports
		}
		before := reports()
		r.after(time.Hour, r.circuit(adminapi.EndpointCircuitOpen))
		check.Equal(r.T, "reports without a subscription", reports()-before, 0)
		ops := destination("ops", liveconfig.SourceNotices)
		ops.Filter = &liveconfig.Filter{Events: []string{"Circuit*"}, Expression: `call.properties.destination == "crm"`}
		r.config.Destinations = append(r.config.Destinations, ops)
		r.apply()
		got := r.after(time.Minute, nil, notices.CircuitOpened)
		check.Equal(r.T, "destinations that do not get it", strings.Join(got[0].Skip, ","), "")
		got = r.after(time.Minute, func() { r.crm().DeadLettered = 1 }, notices.DeadLetters)
		check.Equal(r.T, "destinations that do not get it", strings.Join(got[0].Skip, ","), "shop/ops")
	})
}

// A restart neither repeats a notice nor misses one, and a failure to append repeats nothing.
func TestRestartAndFailure(t *testing.T) {
	run(t, func(r *rig) {
		first := r.after(time.Minute, r.circuit(adminapi.EndpointCircuitOpen), notices.CircuitOpened)
		r.stop()
		r.start()
		r.after(10*time.Minute, nil)
		r.stop()
		r.change(r.circuit(adminapi.EndpointHealthy))
		r.start()
		closed := r.after(time.Minute, nil, notices.CircuitClosed)
		check.Equal(r.T, "ids differ", first[0].ID != closed[0].ID, true)
		r.after(10*time.Minute, func() {
			r.fail["shop/posthorn-notices"] = errors.New("full")
			r.circuit(adminapi.EndpointCircuitOpen)()
		})
		r.after(time.Minute, func() { clear(r.fail) }, notices.CircuitOpened)
		r.config.Destinations = r.config.Destinations[1:]
		r.apply()
		r.after(time.Minute, nil)
		check.Equal(r.T, "records after a deletion", r.records(), "calls/web")
	})
}

// A crash between a notice and its record repeats the notice with the same ID, or with another one if
// the fact has changed meanwhile.
func TestCrashBeforeTheRecord(t *testing.T) {
	run(t, func(r *rig) {
		crash := func(deadLettered int64) string {
			r.Helper()
			r.stop()
			clear(r.meta.values)
			r.change(func() { r.crm().DeadLettered = deadLettered })
			r.start()
			return r.after(time.Minute, nil, notices.DeadLetters)[0].ID
		}
		first := crash(2)
		check.Equal(r.T, "ID of the repeated notice", crash(2), first)
		check.Equal(r.T, "ID of the changed notice differs", crash(5) != first, true)
	})
}

// A circuit of a new destination with the name of a deleted one makes a new notice.
func TestSameNameAgain(t *testing.T) {
	run(t, func(r *rig) {
		open := func() {
			r.circuit(adminapi.EndpointCircuitOpen)()
			r.crm().Endpoints[0].Since = time.Now()
		}
		first := r.after(time.Minute, open, notices.CircuitOpened)
		all := r.config.Destinations
		r.config.Destinations = all[1:]
		r.apply()
		r.after(time.Minute, r.circuit(adminapi.EndpointHealthy))
		r.config.Destinations = all
		r.apply()
		second := r.after(time.Minute, open, notices.CircuitOpened)
		check.Equal(r.T, "IDs differ", first[0].ID != second[0].ID, true)
	})
}

// A new destination with the name of a deleted one continues the count of dead letters while some are
// stored, and begins again when none are; in both cases a notice has the new dead letters alone.
func TestDeadLettersOfTheSameNameAgain(t *testing.T) {
	for _, stored := range []bool{true, false} {
		run(t, func(r *rig) {
			count := int64(5)
			r.after(time.Minute, func() { r.crm().DeadLettered = count }, notices.DeadLetters)
			all := r.config.Destinations
			r.config.Destinations = all[1:]
			if stored {
				r.meta.mu.Lock()
				r.meta.deadLettered = map[string]int64{"shop/crm": count}
				r.meta.mu.Unlock()
			}
			r.apply()
			r.after(time.Minute, nil)
			if !stored {
				count = 0
			}
			r.config.Destinations = all
			r.apply()
			r.after(2*time.Hour, func() { r.crm().DeadLettered = count })
			got := r.after(time.Minute, func() { r.crm().DeadLettered = count + 2 }, notices.DeadLetters)
			check.Equal(r.T, "messages", r.properties(got[0]).Messages, 2)

			// The count begins again before the record is removed.
			got = r.after(2*time.Hour, func() { r.crm().DeadLettered = 1 }, notices.DeadLetters)
			check.Equal(r.T, "messages after the count began again", r.properties(got[0]).Messages, 1)
		})
	}
}

// A namespace sends at most ten notices in five seconds.
func TestRate(t *testing.T) {
	run(t, func(r *rig) {
		var names []string
		for i := range 100 {
			names = append(names, fmt.Sprint("e", i))
		}
		r.change(func() {
			r.crm().Endpoints = endpoints(names...)
			for i := range names {
				r.crm().Endpoints[i].State = adminapi.EndpointCircuitOpen
			}
		})
		time.Sleep(21 * time.Second)
		synctest.Wait()
		first := len(r.taken())
		if first < 30 || first > 50 {
			r.Errorf("notices in 21 s: got %d, want 30 to 50", first)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check.Equal(r.T, "all notices", first+len(r.taken()), 100)
	})
}

// An endpoint whose circuit changes all the time does not keep the notices about others waiting.
func TestFairness(t *testing.T) {
	run(t, func(r *rig) {
		const flapping = 700 // More than 10 notices in 5 s are due, at one each 5 minutes.
		r.change(func() {
			var names []string
			for i := range flapping {
				names = append(names, fmt.Sprint("e", i))
			}
			r.crm().Endpoints = endpoints(append(names, "last")...)
		})
		for i := range 10 {
			r.change(func() {
				for e := range flapping {
					r.crm().Endpoints[e].State = []adminapi.EndpointState{adminapi.EndpointCircuitOpen, adminapi.EndpointHealthy}[i%2]
				}
				r.crm().Endpoints[flapping].State = adminapi.EndpointCircuitOpen
			})
			time.Sleep(5 * time.Minute)
		}
		synctest.Wait()
		last := 0
		for _, m := range r.taken() {
			if r.properties(m).Endpoint == "last" {
				last++
			}
		}
		check.Equal(r.T, "notices about the last endpoint", last, 1)
	})
}

// A namespace whose messages cannot be stored delays no other namespace.
func TestFailureOfANamespace(t *testing.T) {
	run(t, func(r *rig) {
		other := r.config
		other.Namespace = "zoo"
		router, err := route.New(r.config)
		check.NoError(r.T, "make the router", err)
		admissiontest.Set(r.gate, liveconfig.NewView([]liveconfig.Revisioned{{Config: r.config}, {Config: other}}), router)
		r.change(func() {
			r.fail["shop/posthorn-notices"] = queue.ErrOverQuota
			r.crm().DeadLettered = 1
			zoo := r.report.Namespaces[0]
			zoo.Namespace = "zoo"
			r.report.Namespaces = append(r.report.Namespaces, zoo)
		})
		time.Sleep(time.Minute)
		synctest.Wait()
		var sources []string
		for _, m := range r.taken() {
			sources = append(sources, m.Source)
		}
		check.Equal(r.T, "Sources of notices", strings.Join(sources, ", "), "zoo/posthorn-notices")
	})
}

// An endpoint of the same name is a new one after its removal.
func TestRemovedEndpoint(t *testing.T) {
	run(t, func(r *rig) {
		r.after(time.Minute, r.circuit(adminapi.EndpointCircuitOpen), notices.CircuitOpened)
		become := func(change func(crm *liveconfig.Destination)) {
			r.config.Destinations = slices.Clone(r.config.Destinations)
			change(&r.config.Destinations[0])
			r.apply()
		}
		become(func(crm *liveconfig.Destination) { crm.State, crm.Endpoints = liveconfig.Paused, nil })
		r.after(time.Minute, nil)
		check.Equal(r.T, "records of a paused destination", r.records(), "calls/web, circuit/crm/primary, messages/crm")
		r.change(func() { r.crm().Endpoints = endpoints("secondary") })
		become(func(crm *liveconfig.Destination) {
			crm.State, crm.Endpoints = liveconfig.Active, []liveconfig.Endpoint{{Name: "secondary"}}
		})
		r.after(time.Minute, nil)
		check.Equal(r.T, "records without the endpoint", r.records(), "calls/web, messages/crm")
	})
}
