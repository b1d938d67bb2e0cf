package slots

import (
	"errors"
	"strconv"
	"testing"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// countingReplica is a copy that keeps its position only.
type countingReplica struct{ position pebblestore.Position }

func (r *countingReplica) Position() pebblestore.Position { return r.position }

func (r *countingReplica) Apply(at pebblestore.Position, _ []byte) error {
	r.position = at
	return nil
}

func (r *countingReplica) AllMeta() (map[string][]byte, error) {
	return map[string][]byte{"batch": []byte(strconv.FormatUint(r.position.Batch, 10))}, nil
}

// entry returns a record with batches of one byte.
func entry(sequence uint64, h header) Entry {
	record := make([]byte, headerBytes)
	for n := h.first; h.kind == kindBatches && n <= h.last; n++ {
		record = appendBatch(record, []byte{byte(n)})
	}
	h.seal(record)
	return Entry{sequence, record}
}

// Records that cannot follow the records before them are damage, and named.
func TestDamagedStream(t *testing.T) {
	claimed := header{kind: kindClaim, session: own, epoch: 1, number: 1, first: 1, last: 0}
	batches := func(session pebblestore.Session, first, last uint64) header {
		return header{kindBatches, session, 1, 2, first, last, 0}
	}
	for _, test := range []struct {
		name    string
		entries []Entry
		damaged uint64 // The sequence of the damaged record; 0 for none.
		last    uint64
	}{
		{"sound", []Entry{entry(1, claimed), entry(2, batches(own, 1, 3)), entry(3, batches(own, 4, 4))}, 0, 4},
		{"missing batches", []Entry{entry(1, claimed), entry(2, batches(own, 1, 3)), entry(3, batches(own, 5, 5))}, 3, 3},
		{"repeated batches", []Entry{entry(1, claimed), entry(2, batches(own, 1, 3)), entry(3, batches(own, 3, 4))}, 3, 3},
		{"session without a claim", []Entry{entry(1, claimed), entry(2, batches(foreign, 1, 3))}, 2, 0},
		{"claim of a wrong epoch", []Entry{entry(1, claimed), entry(2, header{kindClaim, foreign, 3, 1, 1, 0, 0})}, 2, 0},
		{"claim before the last batch", []Entry{entry(1, claimed), entry(2, batches(own, 1, 3)),
			entry(3, header{kindClaim, foreign, 2, 1, 3, 2, 0})}, 3, 3},
		{"unknown kind", []Entry{entry(1, claimed), entry(2, header{99, own, 1, 2, 1, 0, 0})}, 2, 0},
		{"too few batches", []Entry{entry(1, claimed), entry(2, header{kindHeartbeat, own, 1, 2, 3, 2, 0})}, 2, 0},
		{"suspect of another session", []Entry{entry(1, claimed), entry(2, header{kindSuspect, foreign, 0, 1, 1, 0, 0}),
			entry(3, batches(own, 1, 1))}, 0, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &countingReplica{}
			f := &follower{copy: r, next: 1}
			var err error
			for _, e := range test.entries {
				if err = f.apply(e); err != nil {
					break
				}
			}
			var damage *DamageError
			switch {
			case test.damaged == 0 && err != nil:
				t.Errorf("apply: got error %v, want none", err)
			case test.damaged != 0 && !errors.As(err, &damage):
				t.Errorf("apply: got error %v, want a DamageError", err)
			case test.damaged != 0 && damage.Sequence != test.damaged:
				t.Errorf("damaged record: got %d, want %d", damage.Sequence, test.damaged)
			}
			if got := r.Position().Batch; got != test.last {
				t.Errorf("last batch: got %d, want %d", got, test.last)
			}
		})
	}
}

// Parts of a batch without an end are void when another session claims the slot.
func TestPartsWithoutAnEnd(t *testing.T) {
	r := &countingReplica{}
	f := &follower{copy: r, next: 1}
	for i, h := range []header{
		{kindClaim, own, 1, 1, 1, 0, 0}, {kindPart, own, 1, 2, 1, 0, 0},
		{kindClaim, foreign, 2, 1, 1, 0, 0}, {kindBatches, foreign, 2, 2, 1, 1, 0},
	} {
		if err := f.apply(entry(uint64(i+1), h)); err != nil {
			t.Fatalf("record %d: got error %v, want none", i+1, err)
		}
	}
	if want := (pebblestore.Position{Batch: 1, Session: foreign}); r.Position() != want {
		t.Errorf("position: got %v, want %v", r.Position(), want)
	}
}

// A record that does not follow the last one means that the records between were trimmed: a snapshot
// replaces the copy.
func TestTrimmedBehindTheFollower(t *testing.T) {
	f := &follower{copy: &countingReplica{}, next: 1}
	if err := f.apply(entry(1, header{kindClaim, own, 1, 1, 1, 0, 0})); err != nil {
		t.Fatal(err)
	}
	var damage *DamageError
	err := f.apply(entry(3, header{kindBatches, own, 1, 2, 1, 3, 0}))
	if !errors.Is(err, ErrForeignCopy) || errors.As(err, &damage) {
		t.Errorf("apply: got error %v, want %v and no DamageError", err, ErrForeignCopy)
	}
}

// A new copy that begins behind the first batch needs a snapshot; the stream is not damaged.
func TestNewCopyOfTrimmedStream(t *testing.T) {
	for _, h := range []header{{kindBatches, own, 1, 9, 15, 16, 0}, {kindClaim, own, 2, 1, 15, 14, 0}, {kindHeartbeat, own, 1, 9, 15, 14, 0}} {
		f := &follower{copy: &countingReplica{}, next: 7}
		var damage *DamageError
		if err := f.apply(entry(7, h)); !errors.Is(err, ErrForeignCopy) || errors.As(err, &damage) {
			t.Errorf("apply a %v: got error %v, want %v and no DamageError", h.kind, err, ErrForeignCopy)
		}
	}
}
