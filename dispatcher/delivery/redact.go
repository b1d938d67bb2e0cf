package delivery

import (
	"bytes"
	"fmt"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/redact"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// redaction are the rules of a destination; the zero value changes nothing.
type redaction struct {
	rules *liveconfig.Redact
	// text is redact.Text of rules.
	text     []byte
	redactor *redact.Redactor
}

func newRedaction(rules *liveconfig.Redact) (r redaction, err error) {
	r.rules, r.text = rules, redact.Text(rules)
	if r.redactor, err = redact.New(rules); err != nil {
		err = fmt.Errorf("redact: %w", err)
	}
	return r, err
}

// same reports whether a response to a request of one destination config may be shown with the other.
func (r *redaction) same(o *redaction) bool { return bytes.Equal(r.text, o.text) }

// body returns the bytes to sign and to send, and the paths of redaction that matched. A body that changes is a copy. Only messages
// that are marked for long numbers need a conversion.
func (s *destinationConfig) body(d *queue.Delivery) (body []byte, matched uint64, err error) {
	body, matched, err = s.redaction.redactor.Apply(d.Body)
	if err != nil || !d.LongNumbers || s.exactNumbers {
		return body, matched, err
	}
	body, err = event.FixedPoint(body)
	return body, matched, err
}

// presentRules returns the rules of a destination; of one without a config, the last ones since the start of the process.
func (e *Engine) presentRules(destination string) (r redaction) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d := e.registry.destinations[destination]; d != nil {
		r = d.redaction
	}
	return r
}

// ShownBody returns the body of a dead letter as it may be shown: redacted by the rules at its death and the present ones.
func (e *Engine) ShownBody(d *queue.DeadLetter) ([]byte, error) {
	if len(d.Body) == 0 {
		return nil, nil // It is damaged.
	}
	r, err := redact.Stored(d.Failure.Redact, e.presentRules(d.Lane.Destination).rules)
	if err != nil {
		return nil, err
	}
	body, _, err := r.Apply(d.Body)
	return body, err
}

// ShownResponse returns the receiver's response in a dead letter, unless the rules have changed since the request: it may
// repeat what the present ones redact.
func (e *Engine) ShownResponse(d *queue.DeadLetter) []byte {
	now := e.presentRules(d.Lane.Destination)
	if now.rules != nil && !bytes.Equal(now.text, d.Failure.Redact) && len(d.Failure.Response) > 0 {
		return []byte(responseHidden)
	}
	return d.Failure.Response
}

// responseHidden replaces a response to a request that other rules redacted.
const responseHidden = "[not shown: spec.redact has changed since the request]"

// unmatchedAfter is the number of messages after which the report names the paths that matched none.
const unmatchedAfter = 1000

// matches counts the messages of a revision of a destination, and has a bit for each path of redaction that matched one.
type matches struct {
	messages int64
	paths    uint64
}

// add counts n messages.
func (m *matches) add(n int, paths uint64) {
	m.messages += int64(n)
	m.paths |= paths
}

// report returns the paths that matched no message; nil if there is none, or if it is too early.
func (m *matches) report(r *redact.Redactor) *adminapi.UnmatchedPaths {
	if m.messages < unmatchedAfter {
		return nil
	}
	u := &adminapi.UnmatchedPaths{Messages: m.messages}
	for i, path := range r.Paths() {
		if m.paths&(1<<i) == 0 {
			u.Paths = append(u.Paths, path)
		}
	}
	if u.Paths == nil {
		return nil
	}
	return u
}
