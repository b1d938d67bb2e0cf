package simulation

import (
	"os"
	"slices"
	"testing"

	"github.com/posthorn/posthorn/test/witness"
)

// again is the number of runs of a plan of which most must fail.
const again = 5

// TestShrink shortens the plan of the seed in POSTHORN_SIMULATION_SHRINK: it removes each step without which most runs still
// fail, with POSTHORN_SIMULATION_LOG for several processes. Without the variable, nothing is run.
func TestShrink(t *testing.T) {
	seed := setting("POSTHORN_SIMULATION_SHRINK", 0)
	if seed == 0 {
		t.Skip("POSTHORN_SIMULATION_SHRINK is not set")
	}
	t.Setenv("TMPDIR", t.TempDir()) // For the journals.
	var log func() *replicatedLog
	if os.Getenv("POSTHORN_SIMULATION_LOG") != "" {
		log = newReplicatedLog
	}
	plan := newPlan(uint64(seed), log != nil)
	t.Logf("the plan fails in %d of %d runs", failures(t, seed, plan, log), again)
	for i := 0; i < len(plan); {
		if shorter := slices.Delete(slices.Clone(plan), i, i+1); failures(t, seed, shorter, log) > again/2 {
			plan = shorter
		} else {
			i++
		}
	}
	t.Logf("the shortest plan fails in %d of %d runs", failures(t, seed, plan, log), again)
	for _, s := range plan {
		t.Logf("step of seed %d: %s", s.seed, kinds[s.kind].name)
	}
}

// failures is the number of runs of a plan in which a clause is violated, or does not hold that always must.
func failures(t *testing.T, seed int, plan []step, log func() *replicatedLog) (n int) {
	t.Helper()
	for range again {
		if slices.ContainsFunc(simulate(t, uint64(seed), plan, log), fails) {
			n++
		}
	}
	return n
}

func fails(v witness.Verdict) bool {
	return v.Result == witness.Violated || v.Result != witness.Holds && slices.Contains(always, v.Clause.ID)
}
