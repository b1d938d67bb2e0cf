package delivery

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/delivery/shape"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// destination is a destination of the config, or a removed one whose lanes are kept during the grace period.
type destination struct {
	key, namespace, name string
	// set is nil after the destination is removed from the config.
	set       *destinationConfig
	endpoints map[string]*liveEndpoint
	lanes     []*lane
	// parked is true while the destination is missing in the config although it was not deleted. Its
	// dead letters and its ledger are kept.
	parked bool
	// trim limits the dead letters, also after the removal; nil if the removal was before this run.
	trim    *liveconfig.DeadLetters
	metrics destinationMetrics
	// owner is shared by the destinations of the namespace.
	owner *namespace
	// atStart is the ledger at the start of the process. Counters begin at 0: after a crash the ledger may be a few
	// messages lower than the last scrape, which Prometheus would read as a reset.
	atStart queue.Ledger
	// suspensions are the ones in the store.
	suspensions suspensions
	// changed is marked when the report changes; nil before the destination was in a config.
	changed *changes.Object
	// filterFailure is the last failure of the filter for a message that was accepted after changedAt, the time of the
	// last edit; nil if there was none.
	filterFailure *adminapi.Failure
	changedAt     time.Time
	// redaction is that of the last set.
	redaction redaction
	// matches are those of the present revision.
	matches matches
	// tests bounds SendTest; nil before the first one.
	tests *rate.Limiter
}

// destinationConfig is the compiled config of a destination. It is replaced, never changed, so requests in
// flight end with the settings of their start.
type destinationConfig struct {
	generation int64
	revision   string
	// active is false if the destination is suspended or paused.
	active bool
	policy retry.Policy
	signer sign.Signer
	// success is the condition for 2xx responses, and successText its text; nil and empty if there is none.
	success     *expression.Success
	successText string
	// targets are the endpoints in the order of the config; configs has the same order, for comparison.
	targets      []target
	configs      []liveconfig.Endpoint
	maxInFlight  int
	perSecond    int
	deadLetters  liveconfig.DeadLetters
	exactNumbers bool
	redaction    redaction
	// shape makes the requests from its config; nil for a POST of the message.
	shape       *shape.Shape
	shapeConfig *liveconfig.Request
	// batch has the limits of batches; nil if each message has its own request.
	batch *liveconfig.Batch
	// suspensions extend the windows.
	suspensions suspensions
}

// newDestinationConfig compiles a config. It returns the settings without what has an error. old, which may be nil, has
// prepared requests to use again.
func newDestinationConfig(c *liveconfig.Destination, old *destinationConfig, client Poster) (*destinationConfig, error) {
	s := &destinationConfig{
		generation: c.Generation, revision: c.Revision, configs: c.Endpoints,
		active: c.State == liveconfig.Active,
		policy: retry.Policy{Window: c.Delivery.RetryWindow(), MinBackoff: c.Delivery.MinBackoff(), MaxBackoff: c.Delivery.MaxBackoff(),
			Timeout: c.Delivery.Timeout(), StatusCodes: c.Delivery.RetryStatusCodes},
		maxInFlight: max(1, c.Delivery.MaxInFlight), perSecond: c.Delivery.RequestsPerSecond,
		deadLetters: c.DeadLetters, exactNumbers: c.ExactNumbers, shapeConfig: c.Request, batch: c.Batch,
	}
	var errs []error
	var err error
	s.redaction, err = newRedaction(c.Redact)
	errs = append(errs, err)
	if old != nil && reflect.DeepEqual(old.shapeConfig, c.Request) {
		s.shape = old.shape
	} else {
		s.shape, err = shape.New(c.Request)
		errs = append(errs, err)
	}
	if s.active {
		s.signer, err = sign.New(c.Signing)
		errs = append(errs, err)
	}
	if rule := c.SuccessRule; rule != nil && s.active {
		var err error
		s.policy.BuryRejected, s.successText = rule.DeadLetter, rule.Expression
		if old != nil && old.successText == rule.Expression {
			s.success = old.success
		} else if s.success, err = expression.CompileSuccess(rule.Expression); err != nil {
			errs = append(errs, fmt.Errorf("successRule: %w", err))
		}
	}
	for _, config := range c.Endpoints {
		t := target{to: old.prepared(config, keptAccepted(c))}
		if t.to == nil && s.active {
			if t.to, err = client.Prepare(config); err != nil {
				errs = append(errs, fmt.Errorf("endpoint %q: %w", config.Name, err))
			} else if n := keptAccepted(c); n > 0 {
				t.to.KeepAccepted(n)
			}
		}
		s.targets = append(s.targets, t)
	}
	return s, errors.Join(errs...)
}

// keptAccepted is the number of bytes of a 2xx response that are needed.
func keptAccepted(c *liveconfig.Destination) int {
	switch {
	case c.Batch != nil && c.Batch.PerItem:
		return 64 << 10
	case c.SuccessRule != nil:
		return expression.MaxResponseBytes
	}
	return 0
}

// prepared returns the prepared request of an endpoint with unchanged config, or nil. keep are the bytes of responses that it keeps.
func (s *destinationConfig) prepared(config liveconfig.Endpoint, keep int) *egress.Endpoint {
	if s == nil {
		return nil
	}
	for i, old := range s.configs {
		if to := s.targets[i].to; to != nil && to.KeptAccepted() == keep && reflect.DeepEqual(old, config) {
			return to
		}
	}
	return nil
}

// judge makes a failure of a 2xx response that is no success by the destination's expression. The evaluations of a
// namespace follow each other, so that they need one CPU at most.
func (s *destinationConfig) judge(to target, r *egress.Result, now time.Time) {
	if r.Accepted == nil || s.success == nil {
		return
	}
	evaluating := to.destination.owner.evaluating
	evaluating.Lock()
	ok, why := s.success.Accepts(expression.Response{Status: r.StatusCode, Headers: r.Accepted.Headers, Body: r.Accepted.Body,
		Truncated: r.Accepted.Truncated})
	evaluating.Unlock()
	if !ok {
		to.to.Reject(r, retry.RejectedByExpression, "spec.success.expression does not accept the response: "+why, now)
	}
}

// countDead counts n dead letters.
func (d *destination) countDead(reason string, n int64) {
	d.metrics.dead.add(reason, n)
	d.owner.dead.add(reason, n)
}

// filterFailureFor is how long the report has a failure of a filter.
const filterFailureFor = 10 * time.Minute

// failFilter records that the filter failed for a message.
func (d *destination) failFilter(m *queue.Delivery, now time.Time) {
	if m.AcceptedAt.Before(d.changedAt) {
		return // An earlier filter failed.
	}
	if before := d.filterFailure; before == nil || before.Message != m.FilterError || now.Sub(before.Time) >= filterFailureFor {
		d.changed.Transition()
	}
	d.filterFailure = &adminapi.Failure{Time: now, Reason: queue.ReasonFilterFailed, Message: m.FilterError}
}

// request makes the request for a message: the bytes to sign and to send, and what differs from a POST of them.
// matched are the paths of redaction that match the message.
func (s *destinationConfig) request(d *queue.Delivery) (r shape.Request, matched uint64, err error) {
	r, matched, err = s.element(d)
	if s.batch != nil && err == nil && !r.Omitted {
		r = s.endBatch(r, s.appendElement(nil, r.Body))
	}
	return r, matched, err
}

// element makes the request for a message alone.
func (s *destinationConfig) element(d *queue.Delivery) (r shape.Request, matched uint64, err error) {
	body, matched, err := s.body(d)
	if err != nil {
		return r, matched, err
	}
	r, err = s.shape.Request(shape.Message{Source: d.Lane.Source, Destination: d.Lane.Destination, Type: d.Type, Body: body,
		LongNumbers: d.LongNumbers && s.exactNumbers})
	return r, matched, err
}
