package audience

import (
	"bytes"
	"errors"
	"io"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// diff merges the previous members with the users of a sync. Both streams are sorted by id without
// repetitions. member gets the new members, sorted; change gets the added, removed and changed
// users.
//
// In a snapshot (full) a missing user is removed; in an increment, a user with opRemove. resend
// also includes the unchanged members of the sync. diff only calls its arguments, and its memory is
// constant.
func diff(before, now stream, full, resend bool, member, change func(record) error) (c adminapi.SyncCounts, err error) {
	old, oldErr := before()
	in, inErr := now()
	emit := func(op op, r record) error {
		r.op = op
		return change(r)
	}
	keep := func(r record) error {
		c.Members++
		r.op = opMember
		return member(r)
	}
	for {
		if err := errors.Join(failure(oldErr), failure(inErr)); err != nil {
			return c, err
		}
		if oldErr != nil && inErr != nil {
			return c, nil
		}
		order := 0
		switch {
		case oldErr != nil:
			order = 1
		case inErr != nil:
			order = -1
		default:
			order = bytes.Compare(old.id, in.id)
		}
		if order <= 0 {
			c.Before++
		}
		switch {
		case order < 0 && full: // not in the snapshot
			c.Removed++
			err = emit(opLeft, old)
		case order < 0:
			err = keep(old)
		case order > 0 && in.op == opRemove: // was no member
		case order > 0:
			c.Added++
			err = errors.Join(emit(opJoined, in), keep(in))
		case in.op == opRemove:
			c.Removed++
			err = emit(opLeft, old)
		case !bytes.Equal(old.value, in.value):
			c.Changed++
			err = errors.Join(emit(opChanged, in), keep(in))
		case resend:
			c.Resent++
			err = errors.Join(emit(opSame, in), keep(in))
		default:
			err = keep(in)
		}
		if err != nil {
			return c, err
		}
		if order <= 0 {
			old, oldErr = before()
		}
		if order >= 0 {
			in, inErr = now()
		}
	}
}

func failure(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
