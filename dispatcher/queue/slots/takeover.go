package slots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// TakeOver makes the store in dir the store of a slot: it applies all records of the stream,
// claims the slot, and returns the Log with which pebblestore.Open opens the store. The files in
// dir are removed first when they are damaged or not a part of the stream.
//
// The caller must know that the slot may be claimed. The claim ends the session that had the slot.
func TakeOver(ctx context.Context, log Log, dir string, o pebblestore.Options) (*Writer, error) {
	o.Log = nil
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	w, err := takeOver(ctx, log, dir, o)
	if isUnusable(err) {
		o.Logger.Warn("local files are not a part of the log; restoring them from the log", "dir", dir, "error", err)
		if err := removeStore(o.FS, dir); err != nil {
			return nil, fmt.Errorf("take over a slot: %w", err)
		}
		w, err = takeOver(ctx, log, dir, o)
	}
	if err != nil {
		return nil, fmt.Errorf("take over a slot: %w", err)
	}
	return w, nil
}

func takeOver(ctx context.Context, log Log, dir string, o pebblestore.Options) (*Writer, error) {
	r, err := pebblestore.OpenReplica(dir, o)
	if err != nil {
		return nil, err
	}
	w, err := Claim(ctx, log, r, Options{Logger: o.Logger})
	if err = errors.Join(err, r.Close()); err != nil && w != nil {
		w.Close()
	}
	return w, err
}

// isUnusable reports whether the files of a copy, and not the log, are the cause of an error.
func isUnusable(err error) bool {
	var corrupt *pebblestore.CorruptError
	return errors.Is(err, ErrForeignCopy) || errors.As(err, &corrupt)
}

func removeStore(fs vfs.FS, dir string) error {
	if fs == nil {
		fs = vfs.Default
	}
	return fs.RemoveAll(dir)
}

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
	c := newCandidate(f, s.Last, o.Now())
	c.force, c.exited, c.claimAfter = force, o.Exited, o.claimAfter
	if err := c.run(ctx, log, o); err != nil {
		return nil, fmt.Errorf("claim the slot: %w", err)
	}
	return newWriter(log, newPublisher(c.won.header, c.follower.next-1, c.won.firstSent, s), o), nil
}

// run takes the steps of the candidate until it owns the slot.
func (c *candidate) run(ctx context.Context, log Log, o Options) error {
	entries, stop := tail(ctx, log, c.follower.next, o.Logger)
	defer stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
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
			if err := c.apply(o.Now(), e); err != nil {
				return err
			}
		case <-wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
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

// tail reads the records from a sequence on, until stop. It starts again when the stream cannot be
// read.
func tail(ctx context.Context, log Log, from uint64, logger *slog.Logger) (entries <-chan Entry, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	buffer, done := make(chan Entry, tailBuffer), make(chan struct{})
	go func() {
		defer close(done)
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
	return buffer, func() {
		cancel()
		<-done
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
