package slots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Claim brings a copy to the end of the stream, claims the slot for a new session, and returns the
// session's Writer. The claim is the last step: it names the last batch, and it lands only if the
// copy has applied every record. Claim repeats a claim that does not land until ctx ends.
func Claim(ctx context.Context, log Log, copied Replica, o Options) (*Writer, error) {
	return newSession(ctx, log, copied, o, true)
}

// Follow applies the records of the stream to a copy until the slot has no owner, claims it for a
// new session as Claim does, and returns the session's Writer. A slot has no owner when its stream
// is empty, its session has ended (Options.Exited, or by Writer.Release), or its session wrote
// nothing for suspectAfter and then ignored a suspect record for claimAfter.
func Follow(ctx context.Context, log Log, copied Replica, o Options) (*Writer, error) {
	return newSession(ctx, log, copied, o, false)
}

func newSession(ctx context.Context, log Log, copied Replica, o Options, force bool) (*Writer, error) {
	o.setDefaults()
	s, err := log.State(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the state of the log: %w", err)
	}
	f, err := newFollower(ctx, log, s, copied)
	if err != nil {
		return nil, err
	}
	c := newCandidate(f, s, o.Now())
	c.force, c.exited, c.claimAfter, c.mayClaim = force, o.Exited, o.claimAfter, o.MayClaim
	if err := c.run(ctx, log, o); err != nil {
		return nil, fmt.Errorf("claim the slot: %w", err)
	}
	return newWriter(log, newPublisher(c.won.header, c.follower.next-1, c.won.firstSent, s), o), nil
}

// run takes the steps of the candidate until it owns the slot.
func (c *candidate) run(ctx context.Context, log Log, o Options) error {
	entries, stop := tail(ctx, log, c.follower.next, o.Logger)
	defer stop()
	timer, checks := time.NewTimer(0), time.NewTicker(usageInterval)
	defer timer.Stop()
	defer checks.Stop()
	caughtUp := o.CaughtUp
	for {
		if o.Applied != nil {
			o.Applied(c.follower.next - 1)
		}
		if caughtUp != nil && c.follower.next > c.end {
			caughtUp()
			caughtUp = nil
		}
		if err := c.passValues(o); err != nil {
			return err
		}
		var wake <-chan time.Time
		switch s := c.next(o.Now()); s.action {
		case actOwn:
			return nil
		case actPublish:
			if err := c.publish(ctx, log, s, o); err != nil {
				return err
			}
			continue
		default:
			if !s.until.IsZero() {
				timer.Reset(s.until.Sub(o.Now()))
				wake = timer.C
			}
		}
		select {
		case e := <-entries:
			if err := c.read(ctx, log, e, o); err != nil {
				return err
			}
		case <-wake:
		case <-checks.C:
			if o.Now().Sub(c.readAt) < suspectAfter {
				continue
			}
			if err := c.check(ctx, log, o); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// passValues calls Options.Values if it is time.
func (c *candidate) passValues(o Options) error {
	now := o.Now()
	if o.Values == nil || c.follower.next <= c.end || now.Before(c.valuesAt) {
		return nil
	}
	c.valuesAt = now.Add(valuesInterval)
	values, err := c.copy.AllMeta()
	if err != nil {
		return fmt.Errorf("read the values of the copy: %w", err)
	}
	o.Values(values)
	return nil
}

// read applies a record, and before it those that the server of the reader has lost, if the leader has them.
func (c *candidate) read(ctx context.Context, log Log, e Entry, o Options) error {
	for first := c.follower.next; c.follower.next < e.Sequence; {
		lost, err := log.Get(ctx, c.follower.next)
		if errors.Is(err, ErrNoRecord) {
			err = errStaleRead
		}
		if err == nil && lost.Sequence > c.follower.next {
			err = c.lost(ctx, log, lost.Sequence)
		} else if err != nil {
			err = fmt.Errorf("read record %d of the log: %w", c.follower.next, err)
		}
		if err != nil {
			return err
		}
		if c.follower.next == first {
			o.Logger.Warn("a server of the log lacks records; reading them from the one that leads the stream", "from", first, "to", e.Sequence-1)
		}
		if err := c.apply(o.Now(), lost); err != nil {
			return err
		}
	}
	return c.apply(o.Now(), e)
}

// lost returns the error for records before a sequence that the leader does not have.
func (c *candidate) lost(ctx context.Context, log Log, before uint64) error {
	s, err := log.State(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("read the state of the log: %w", err)
	case s.First > c.follower.next:
		return fmt.Errorf("%w: records %d to %d were trimmed before it applied them", ErrForeignCopy, c.follower.next, before-1)
	}
	return &GapError{c.follower.next, before - 1, c.copy.Position().Batch}
}

// check reads the state of a stream that is silent. An owner appends a record every second, so the stream
// may be another one.
func (c *candidate) check(ctx context.Context, log Log, o Options) error {
	reading, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	s, err := log.State(reading)
	if err == nil || errors.Is(err, ErrNoStream) {
		return c.checked(o.Now(), s, err)
	}
	return nil
}

// publish publishes a proposal once.
func (c *candidate) publish(ctx context.Context, log Log, s step, o Options) error {
	publishing, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	sequence, err := log.Publish(publishing, s.expected, s.id, s.data)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		o.Logger.Debug("publishing to the log failed; retrying", "error", err)
		c.refused(o.Now(), err)
		return nil
	}
	return c.answered(o.Now(), sequence)
}

// tailBuffer is the number of records that are read ahead of a copy.
const tailBuffer = 16

// tail reads the records from a sequence on, until stop, which does not wait for a request to the
// stream. It starts again when the stream cannot be read.
func tail(ctx context.Context, log Log, from uint64, logger *slog.Logger) (entries <-chan Entry, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	buffer := make(chan Entry, tailBuffer)
	go func() {
		for ctx.Err() == nil {
			err := log.Tail(ctx, from, func(e Entry) error {
				select {
				case buffer <- e:
					from = e.Sequence + 1
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			if ctx.Err() == nil {
				logger.Warn("reading the log failed; retrying", "error", err)
				_ = pause(ctx, repeatAfter)
			}
		}
	}()
	return buffer, cancel
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
