package slots

import (
	"context"
	"crypto/rand"
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
	w, err := Claim(ctx, log, r, o.Logger)
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
func Claim(ctx context.Context, log Log, copied Replica, logger *slog.Logger) (*Writer, error) {
	p, err := claim(ctx, log, copied)
	if err != nil {
		return nil, err
	}
	return newWriter(log, p, logger), nil
}

func claim(ctx context.Context, log Log, copied Replica) (*publisher, error) {
	f, err := newFollower(ctx, log, copied)
	if err != nil {
		return nil, err
	}
	s, err := f.followToEnd(ctx, log)
	if err != nil {
		return nil, err
	}
	c, sent := newClaim(f), time.Now()
	for {
		sequence, err := publishOnce(ctx, log, f.next-1, c)
		switch {
		case err == nil:
			return newPublisher(c, sequence, sent, s), nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("claim the slot: %w", err)
		case !errors.Is(err, ErrWrongSequence):
			if err := pause(ctx, repeatAfter); err != nil {
				return nil, fmt.Errorf("claim the slot: %w", err)
			}
			continue
		}
		before := f.next
		if s, err = f.followToEnd(ctx, log); err != nil {
			return nil, err
		}
		switch {
		case f.session == c.session: // An earlier request has landed, and its answer was lost.
			return newPublisher(c, f.next-1, sent, s), nil
		case f.next == before: // The read was stale.
			err = pause(ctx, repeatAfter)
		default:
			c, sent = newClaim(f), time.Now()
		}
		if err != nil {
			return nil, fmt.Errorf("claim the slot: %w", err)
		}
	}
}

// followToEnd applies all records that the stream has now.
func (f *follower) followToEnd(ctx context.Context, log Log) (State, error) {
	s, err := log.State(ctx)
	if err != nil {
		return s, fmt.Errorf("read the state of the log: %w", err)
	}
	return s, f.follow(ctx, log, s.Last)
}

// newClaim returns the claim of a new session behind the last record of a follower.
func newClaim(f *follower) header {
	h := header{kind: kindClaim, epoch: f.epoch + 1, number: 1, first: f.last + 1, last: f.last}
	_, _ = rand.Read(h.session[:]) // It never fails.
	return h
}

// publishOnce publishes a record without a payload, and does not repeat it.
func publishOnce(ctx context.Context, log Log, expected uint64, h header) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	record := make([]byte, headerBytes)
	h.seal(record)
	return log.Publish(ctx, expected, h.id(), record)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
