package simulation

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/witness"
)

// receiverFault is how a receiver fails: with a status, after a delay.
type receiverFault struct {
	status     int
	after      time.Duration
	retryAfter time.Duration
}

var receiverFaults = []receiverFault{
	{status: 500}, {status: 503, retryAfter: 5 * time.Second}, {status: 429, after: 50 * time.Millisecond}, {after: timeout},
}

// receiver begins the URLs of all receivers.
const receiver = "http://receiver.test/"

// receivers are all receivers, as the client of one process reaches them.
type receivers struct {
	w         *world
	mu        sync.Mutex
	endpoints map[*egress.Endpoint]liveconfig.Endpoint
}

func newReceivers(w *world) *receivers {
	return &receivers{w: w, endpoints: map[*egress.Endpoint]liveconfig.Endpoint{}}
}

// Prepare implements delivery.Poster.
func (r *receivers) Prepare(e liveconfig.Endpoint) (*egress.Endpoint, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &egress.Endpoint{}
	r.endpoints[p] = e
	return p, nil
}

// Forget implements delivery.Poster.
func (*receivers) Forget(*egress.Endpoint) {}

func (r *receivers) endpoint(e *egress.Endpoint) liveconfig.Endpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.endpoints[e]
}

// Post implements delivery.Poster. A receiver gets a request of a process that is lost during it, or not, and the process no
// answer.
func (l *life) Post(ctx context.Context, e *egress.Endpoint, headers []egress.Header, body []byte) egress.Result {
	w, to, begin := l.pod.w, l.endpoint(e), l.pod.w.Clock.Now()
	receipt := w.receiptOf(to, headers, string(body))
	w.mu.Lock()
	dead := l.dead
	fault, fails := w.fault(receipt.URL)
	if !fails {
		fault = receiverFault{status: http.StatusOK, after: time.Duration(1+w.dice.IntN(40)) * time.Millisecond}
		if strings.Contains(receipt.URL, "/strict/") && rejects(receipt.Key) {
			fault.status = http.StatusConflict // It never opens the circuit.
		}
	}
	w.mu.Unlock()
	result := egress.Result{StatusCode: fault.status, Reason: reason(fault.status), RetryAfter: fault.retryAfter, Sent: true,
		RemoteAddr: "192.0.2.1:80"}
	deadline, _ := ctx.Deadline()
	select {
	case <-time.After(min(fault.after, deadline.Sub(l.now()))):
	case <-ctx.Done():
		result = egress.Result{Reason: egress.TimedOut, Sent: true}
	}
	if receipt.Status = result.StatusCode; result.Reason != "" {
		result.Message = "failed"
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if l.dead {
		if !dead && w.dice.IntN(2) == 0 {
			w.Received.Write(witness.Line{Begin: begin, Receipt: receipt})
		}
		return egress.Result{Reason: egress.ConnectionFailed, Message: "failed"}
	}
	w.Received.Write(witness.Line{Begin: begin, Receipt: receipt})
	return result
}

// owner returns the destination with a URL in one of its revisions.
func (w *world) owner(url string) *target {
	parts := strings.Split(strings.TrimPrefix(url, receiver), "/")
	return w.find(parts[0] + "/" + parts[1])
}

// reason is the reason of a failure with a status, 0 for a timeout.
func reason(status int) egress.Reason {
	switch {
	case status == 0:
		return egress.TimedOut
	case status >= 500:
		return egress.ServerError
	case status == http.StatusTooManyRequests:
		return egress.Throttled
	case status >= 400:
		return egress.Rejected
	}
	return ""
}

// rejects reports whether the receiver of strict rejects a message.
func rejects(key string) bool { return strings.HasSuffix(key, "1") }

// fault returns how the receiver at a URL fails. The caller holds mu.
func (w *world) fault(url string) (receiverFault, bool) {
	for prefix, f := range w.failing {
		if strings.HasPrefix(url, receiver+prefix+"/") {
			return f, true
		}
	}
	return receiverFault{}, false
}

// receiptOf returns what a receiver gets, with the secrets whose signatures hold.
func (w *world) receiptOf(to liveconfig.Endpoint, headers []egress.Header, body string) *witness.Receipt {
	r := &witness.Receipt{URL: to.URL.Reveal(), Body: body, Headers: map[string]string{}}
	for _, h := range to.Headers {
		r.Headers[h.Name] = h.Value.Reveal()
	}
	for _, h := range headers {
		switch h.Name {
		case "Idempotency-Key":
			r.Key = h.Value
		case "X-Signature":
			for _, secret := range w.owner(r.URL).secrets() {
				if h.Value == signature.SHA1(secret, body) {
					r.Signed = append(r.Signed, secret)
				}
			}
		}
	}
	return r
}
