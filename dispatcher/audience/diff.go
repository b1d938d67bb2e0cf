package audience

import (
	"bytes"
	"errors"
	"io"
)

// Counts are what a sync found.
type Counts struct {
	// Before and Members are how many members there were, and are.
	Before  int64 `json:"before"`
	Members int64 `json:"members"`
	// Added joined, Removed left, Changed have another value.
	Added   int64 `json:"added"`
	Removed int64 `json:"removed"`
	Changed int64 `json:"changed"`
	// Resent are as they were, and are told again because the sync asked for it.
	Resent int64 `json:"resent,omitempty"`
}

// Changes is how many users an identify call is for.
func (c Counts) Changes() int64 { return c.Added + c.Removed + c.Changed + c.Resent }

// diff merges the previous members with what a sync brought. Both streams are
// sorted by id without repetitions. member gets the new members, sorted; change
// gets who joined, left or changed.
//
// In a snapshot (full) who is missing has left; in an increment, who is named
// with opRemove. resend tells members whom the sync lists although they are as
// they were. diff is pure but for what it is given; its memory is constant.
func diff(before, now stream, full, resend bool, member, change func(record) error) (c Counts, err error) {
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
