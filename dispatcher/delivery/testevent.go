package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Why SendTest sends nothing.
var (
	ErrNoSuchEndpoint = errors.New("there is no such destination, or no such endpoint of it")
	ErrNotActive      = errors.New("the destination is suspended or not accepted, so its requests are not prepared; see its condition Accepted")
	ErrNotSending     = errors.New("this dispatcher may not send now; the owner of the replicated log does")
	ErrTooManyTests   = errors.New("too many tests of this destination; 3 at once, and 10 a minute, are permitted")
)

// newTestLimit bounds the tests of a destination.
func newTestLimit() *rate.Limiter { return rate.NewLimiter(rate.Every(6*time.Second), 3) }

// SendTest sends a test event to an endpoint of a destination ("namespace/name"), or to each one with "", one after the
// other, and returns the attempts. The requests are signed, authenticated and checked as deliveries. They are not
// deliveries: no Source accepted the event, so ledgers, metrics, circuits and limits do not count it, and a failure is
// not retried. An open circuit does not prevent them.
func (e *Engine) SendTest(ctx context.Context, destination, endpoint string) (list []adminapi.Attempt, err error) {
	set, targets, err := e.testTargets(destination, endpoint)
	if err != nil {
		return nil, err
	}
	for _, t := range targets {
		if !e.maySend() { // The lease can end between two requests.
			return nil, ErrNotSending
		}
		a, err := e.sendTest(ctx, set, t)
		if err != nil {
			return nil, err
		}
		list = append(list, a)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return list, nil
}

func (e *Engine) testTargets(destination, endpoint string) (set *destinationConfig, targets []target, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.registry.destinations[destination]
	if d == nil || d.set == nil {
		return nil, nil, ErrNoSuchEndpoint
	}
	for _, t := range d.set.targets {
		if endpoint != "" && (t.liveEndpoint == nil || t.name != endpoint) {
			continue
		}
		if t.to == nil || t.liveEndpoint == nil {
			return nil, nil, ErrNotActive
		}
		targets = append(targets, t)
	}
	if d.tests == nil {
		d.tests = newTestLimit()
	}
	switch {
	case !d.set.active:
		return nil, nil, ErrNotActive
	case len(targets) == 0:
		return nil, nil, ErrNoSuchEndpoint
	case !d.tests.Allow():
		return nil, nil, ErrTooManyTests
	}
	return d.set, targets, nil
}

// sendTest sends a test event to one endpoint.
func (e *Engine) sendTest(ctx context.Context, set *destinationConfig, to target) (adminapi.Attempt, error) {
	started := e.o.Now()
	id := "posthorn-test-" + uuid.NewString()
	p := &post{set: set, target: to, message: queue.Delivery{ID: id, Type: string(event.Track), Body: testEvent(id, to, started)}}
	p.message.Lane.Destination = to.destination.key
	var r ended
	var headers []egress.Header
	switch request, _, err := p.set.request(&p.message); {
	case err != nil:
		r.Result = unmade(err)
	case request.Omitted:
		r.Result = egress.Result{Reason: egress.TransformFailed, Message: "spec.request.body is null for the test event, so that nothing is sent"}
	default:
		p.body = request.Body
		headers = p.headers(nil, &request, started)
		r.Result = e.o.Client.Post(egress.WithDeadline(ctx, started.Add(set.policy.Timeout)), to.to.With(request.Line), headers, p.body)
	}
	r.at = e.o.Now()
	r.duration = r.at.Sub(started)
	set.judge(to, &r.Result, r.at)
	p.judgeItems(&r.Result, r.at)
	r.Response = set.signer.Redact(r.Response, headers)
	a := attemptOf(p, &r)
	if a.Test = true; ctx.Err() != nil { // The caller ended it, which is no failure of the receiver.
		return a, nil
	}
	kept := a
	kept.Response = "" // The ring has one response, which explains why deliveries fail.
	e.mu.Lock()
	defer e.mu.Unlock()
	e.recorder.keep(&kept, p)
	return a, nil
}

// testEvent is the body of a test: a track call, in the form of an accepted one.
func testEvent(id string, to target, now time.Time) []byte {
	now = now.UTC().Truncate(time.Millisecond)
	body, _ := json.Marshal(struct { // It has no value that can fail.
		Type        string            `json:"type"`
		Event       string            `json:"event"`
		MessageID   string            `json:"messageId"`
		AnonymousID string            `json:"anonymousId"`
		Context     struct{}          `json:"context"`
		Properties  map[string]string `json:"properties"`
		Timestamp   time.Time         `json:"timestamp"`
		ReceivedAt  time.Time         `json:"receivedAt"`
		Version     int               `json:"version"`
	}{string(event.Track), adminapi.TestEvent, id, "posthorn", struct{}{},
		map[string]string{"destination": to.destination.name, "endpoint": to.name}, now, now, 1})
	return body
}
