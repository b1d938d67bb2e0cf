package delivery

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
)

// recorder counts the attempts and outcomes of all destinations, keeps the last attempts of each endpoint, and publishes
// them. The engine's lock guards it.
type recorder struct {
	// perEndpoint is Options.Attempts.
	perEndpoint int
	// duration of all requests, latency of all deliveries.
	duration, latency histogram
	tails             map[*Tail]struct{}
}

// record counts, keeps and publishes the attempt.
func (c *recorder) record(p *post, r *ended) {
	c.countAttempt(p.target.liveEndpoint, r)
	a := attemptOf(p, r)
	if !p.target.destination.redaction.same(&p.set.redaction) {
		a.Response = ""
	}
	c.keep(&a, p)
}

// attemptOf describes a finished request.
func attemptOf(p *post, r *ended) adminapi.Attempt {
	ep := p.target.liveEndpoint
	a := adminapi.Attempt{
		Time: r.at, Duration: r.duration, Timing: adminapi.Timing(r.Timing),
		Source: p.message.Lane.Source, Destination: ep.destination.key, Endpoint: ep.name,
		Seq: p.message.Seq, MessageID: event.ID(p.message.ID), Messages: len(p.batch),
		Generation: p.set.generation, Number: p.message.Attempt + 1,
		StatusCode: r.StatusCode, Reason: string(r.Reason), Message: r.Message, RetryAfter: r.RetryAfter, RemoteAddr: r.RemoteAddr,
		CertificateExpires: r.CertificateExpires, Probe: p.probe,
	}
	if r.Reason != "" {
		a.Response = strings.ToValidUTF8(string(r.Response[:min(len(r.Response), maxKeptResponse)]), "\uFFFD")
	}
	return a
}

// keep adds an attempt to the last ones of its endpoint, and publishes it.
func (c *recorder) keep(a *adminapi.Attempt, p *post) {
	p.target.attempts.add(c.perEndpoint, a, p.batch)
	if len(c.tails) > 0 {
		c.publish(a, p)
	}
}

// countAttempt counts a request.
func (c *recorder) countAttempt(ep *liveEndpoint, r *ended) {
	i := bucket(attemptBuckets, r.duration)
	c.duration.observe(attemptBuckets, i, r.duration)
	ep.metrics.duration.observe(attemptBuckets, i, r.duration)
	ep.metrics.add(r)
	ep.destination.owner.attempts.add(r)
}

// countOutcome counts a message whose age is the time since its acceptance.
func (c *recorder) countOutcome(d *destination, o outcome, age time.Duration) {
	switch o {
	case delivered:
		i := bucket(latencyBuckets, age)
		c.latency.observe(latencyBuckets, i, age)
		d.metrics.latency.observe(latencyBuckets, i, age)
	case rejected:
		d.countDead(string(egress.Rejected), 1)
	case redirected:
		d.countDead(string(egress.Redirected), 1)
	case unaccepted:
		d.countDead(string(retry.RejectedByExpression), 1)
	case transformFailed:
		d.countDead(string(egress.TransformFailed), 1)
	case timedOut:
		d.countDead(string(retry.Expired), 1)
	}
}

// publish sends an attempt to all subscribers.
func (c *recorder) publish(a *adminapi.Attempt, p *post) {
	for t := range c.tails {
		if t.destination != "" && t.destination != a.Destination || t.endpoint != "" && t.endpoint != a.Endpoint {
			continue
		}
		sent := adminapi.AttemptWithBody{Attempt: *a}
		sent.MessageID = event.ID(append([]byte(nil), a.MessageID...))
		if t.bodies {
			if t.waiting.Load()+int64(len(p.body)) > maxTailBytes {
				t.dropped.Add(1)
				continue
			}
			if sent.Body = bytes.Clone(p.body); (p.set.shape != nil || p.set.batch != nil) && !json.Valid(p.body) {
				sent.Body, _ = json.Marshal(string(p.body)) // A text cannot fail to marshal.
			}
		}
		select {
		case t.out <- sent:
			t.waiting.Add(int64(len(sent.Body)))
		default:
			t.dropped.Add(1)
		}
	}
}
