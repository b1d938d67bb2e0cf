package slots

import (
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// candidate is the state machine of a pod that follows a slot which it does not own: it decides
// when to question the owner, and when to claim the slot. It does no I/O: next returns what to do,
// and apply, answered and refused take the result.
//
// Invariants:
//
//   - A proposal (a suspect or a claim) expects the last record that the copy has applied. So a
//     claim lands only if the copy has all batches.
//   - A claim follows a stream without records, the end of a session (a released record, or
//     exited), or a suspect that has been the last record for claimAfter. When the suspect was
//     committed, the lease of the owner had at most leaseTime left: all acknowledged records of the
//     owner were sent before.
type candidate struct {
	*follower
	// force claims the slot at the end of the stream, whatever its last record is.
	force bool
	// exited is a session whose process has ended, as the caller knows.
	exited pebblestore.Session
	// mayClaim is Options.MayClaim.
	mayClaim func() bool
	// end is the last record that the stream had at the start; nothing is proposed before it.
	end uint64
	// claimAfter is the time for which a suspect must be the last record before a claim.
	claimAfter time.Duration
	// stream is the ID of the stream; empty if it has none.
	stream string

	// readAt is the time at which the last record was read. lacksSince is the time from which on the stream
	// lacks applied records; zero while it has them.
	readAt, lacksSince time.Time
	// proposal is the record that is being published, or nil.
	proposal   *outgoing
	pauseUntil time.Time
	// valuesAt is when the values of the copy are passed on again.
	valuesAt time.Time
	// won is the claim that is in the stream, at the sequence next - 1.
	won *outgoing
}

// newCandidate returns the candidate for a stream with a state.
func newCandidate(f *follower, s State, now time.Time) *candidate {
	return &candidate{follower: f, end: s.Last, stream: s.ID, claimAfter: claimAfter, readAt: now}
}

// next returns the next step. After actOwn, the slot belongs to the session of won.
func (c *candidate) next(now time.Time) step {
	switch {
	case c.won != nil:
		return step{action: actOwn}
	case now.Before(c.pauseUntil):
		return step{until: c.pauseUntil}
	case c.follower.next <= c.end:
		return step{} // The copy is behind.
	case c.mayClaim != nil && !c.mayClaim():
		return step{until: now.Add(repeatAfter)}
	}
	k, due := c.due()
	if now.Before(due) {
		return step{until: due}
	}
	if c.proposal == nil {
		c.propose(k, now)
	}
	r := c.proposal
	return step{action: actPublish, id: r.id(), expected: c.follower.next - 1, data: r.data}
}

// due returns the next proposal and its time.
func (c *candidate) due() (kind, time.Time) {
	switch {
	case c.force, c.lastKind == 0, c.lastKind == kindReleased, c.session == c.exited:
		return kindClaim, time.Time{}
	case c.lastKind == kindSuspect:
		return kindClaim, c.readAt.Add(c.claimAfter)
	}
	return kindSuspect, c.readAt.Add(suspectAfter)
}

// propose starts a proposal for a new session.
func (c *candidate) propose(k kind, now time.Time) {
	h := header{kind: k, epoch: c.epoch + 1, number: 1, first: c.last + 1, last: c.last, snapshot: c.snapshot}
	_, _ = rand.Read(h.session[:]) // It never fails.
	c.proposal = &outgoing{header: h, data: make([]byte, headerBytes), firstSent: now}
	h.seal(c.proposal.data)
}

// apply applies the next record to the copy. A record that was applied already is skipped.
func (c *candidate) apply(now time.Time, e Entry) error {
	if e.Sequence < c.follower.next {
		return nil
	}
	if err := c.follower.apply(e); err != nil {
		return err
	}
	c.landed(now, c.proposal != nil && c.lastSession == c.proposal.session)
	return nil
}

// landed takes note of a new last record, which is the proposal or ends it.
func (c *candidate) landed(now time.Time, isProposal bool) {
	c.readAt, c.lacksSince = now, time.Time{}
	if isProposal && c.proposal.kind == kindClaim {
		c.won = c.proposal
	}
	c.proposal, c.pauseUntil = nil, time.Time{}
}

// checked takes the state of a silent stream, or ErrNoStream. An error ends the following: the stream is
// not the one whose records the copy has.
func (c *candidate) checked(now time.Time, s State, err error) error {
	switch {
	case err != nil:
		return err
	case isOther(s.ID, c.stream):
		return fmt.Errorf("%w: its id was %s, and is %s", ErrOtherStream, c.stream, s.ID)
	case s.Last >= c.follower.next-1:
		c.lacksSince = time.Time{}
	case c.lacksSince.IsZero():
		c.lacksSince = now
	case now.Sub(c.lacksSince) >= suspectAfter: // Not a stale read.
		return fmt.Errorf("%w: it had record %d, and ends with record %d", ErrRecordsLost, c.follower.next-1, s.Last)
	}
	return nil
}

// answered takes the sequence of the published proposal.
func (c *candidate) answered(now time.Time, sequence uint64) error {
	if sequence != c.follower.next {
		c.pauseUntil = now.Add(repeatAfter) // The copy is behind, or the answer of another stream.
		return nil
	}
	return c.apply(now, Entry{sequence, c.proposal.data})
}

// refused takes an answer other than an acknowledgement, or the loss of the answer. After
// ErrWrongSequence the copy is behind, and the next record ends the proposal.
func (c *candidate) refused(now time.Time, err error) {
	c.pauseUntil = now.Add(repeatAfter)
	if errors.Is(err, ErrWrongSequence) {
		c.pauseUntil = now.Add(behindPause)
	}
}
