package simulation

import (
	"os"
	"sync/atomic"
	"testing"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/witness"
)

// journals are the journals of a world, in a folder that is kept if the test fails.
type journals struct {
	dir                                        string
	clock                                      *witness.Clock
	sender, received, objects, faults, ledgers *witness.Journal
	number                                     atomic.Int64 // of faults
}

func newJournals(t *testing.T) *journals {
	t.Helper()
	dir, err := os.MkdirTemp("", "posthorn-simulation-")
	check.NoError(t, "create a folder for journals", err)
	j := &journals{dir: dir, clock: witness.NewClock()}
	for role, to := range map[witness.Role]**witness.Journal{witness.Sender: &j.sender, witness.Receiver: &j.received,
		witness.Objects: &j.objects, witness.Faults: &j.faults, witness.Ledgers: &j.ledgers} {
		*to, err = witness.Create(dir, string(role), role, j.clock)
		check.NoError(t, "create a journal", err)
	}
	return j
}

// judge ends the journals, and returns the verdicts of the witness.
func (j *journals) judge(t *testing.T) []witness.Verdict {
	t.Helper()
	for _, journal := range []*witness.Journal{j.sender, j.received, j.objects, j.faults, j.ledgers} {
		check.NoError(t, "end a journal", journal.Close())
	}
	h, err := witness.Read(j.dir)
	check.NoError(t, "read the journals", err)
	return witness.Check(h)
}

// begin notes the begin of a fault, and returns a function that notes its end.
func (j *journals) begin(f witness.Fault) (end func()) {
	f.ID = int(j.number.Add(1))
	j.faults.Write(witness.Line{Fault: &f})
	return func() { j.faults.Write(witness.Line{Fault: &witness.Fault{ID: f.ID, End: true}}) }
}
