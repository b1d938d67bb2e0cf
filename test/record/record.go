// Package record writes the journals of a test that package witness judges. Its main type is Journals.
package record

import (
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/witness"
)

// Journals are the journals of a test, one of each role, in a folder that is kept if the test fails or a clause is violated. The
// methods may be called concurrently.
type Journals struct {
	Dir                                        string
	Clock                                      *Clock
	Sender, Received, Objects, Faults, Ledgers *Journal
	number                                     atomic.Int64 // of faults
	violated                                   bool
}

// Begin begins the journals.
func Begin(t *testing.T) *Journals {
	t.Helper()
	dir, err := os.MkdirTemp("", "posthorn-journals-")
	check.NoError(t, "create a folder for journals", err)
	j := &Journals{Dir: dir, Clock: newClock()}
	for role, to := range map[witness.Role]**Journal{witness.Sender: &j.Sender, witness.Receiver: &j.Received,
		witness.Objects: &j.Objects, witness.Faults: &j.Faults, witness.Ledgers: &j.Ledgers} {
		*to, err = create(dir, string(role), role, j.Clock)
		check.NoError(t, "create a journal", err)
	}
	t.Cleanup(func() {
		if t.Failed() || j.violated {
			t.Logf("the journals are in %s", dir)
		} else {
			_ = os.RemoveAll(dir)
		}
	})
	return j
}

// Judge ends the journals, and returns the verdicts of the witness.
func (j *Journals) Judge(t *testing.T) []witness.Verdict {
	t.Helper()
	for _, journal := range []*Journal{j.Sender, j.Received, j.Objects, j.Faults, j.Ledgers} {
		check.NoError(t, "end a journal", journal.Close())
	}
	h, err := witness.Read(j.Dir)
	check.NoError(t, "read the journals", err)
	verdicts := witness.Check(h)
	j.violated = slices.ContainsFunc(verdicts, func(v witness.Verdict) bool { return v.Result == witness.Violated })
	return verdicts
}

// Fault notes the begin of a fault, and returns a function that notes its end.
func (j *Journals) Fault(f witness.Fault) (end func()) { return j.FaultAt(0, f) }

// FaultAt is Fault for a fault that began at a time of the clock.
func (j *Journals) FaultAt(at time.Duration, f witness.Fault) (end func()) {
	f.ID = int(j.number.Add(1))
	j.Faults.Write(witness.Line{Begin: at, Fault: &f})
	return func() { j.Faults.Write(witness.Line{Fault: &witness.Fault{ID: f.ID, End: true}}) }
}
