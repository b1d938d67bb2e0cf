// Package simulation joins the whole data plane in one process, in virtual time, and lets everything around it fail.
package simulation

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/posthorn/posthorn/test/witness"
)

// TestRandomPlans runs random plans, each of which its seed determines, and lets test/witness judge their journals.
// POSTHORN_SIMULATION_SEEDS is the number of plans, and POSTHORN_SIMULATION_SEED the seed of the first one.
func TestRandomPlans(t *testing.T) { runPlans(t, 300, nil) }

// TestRandomPlansOfSeveralProcesses runs the plans with three processes of a replicated log.
func TestRandomPlansOfSeveralProcesses(t *testing.T) { runPlans(t, 54, newReplicatedLog) }

// runPlans runs a number of plans; with a log, of three processes.
func runPlans(t *testing.T, seeds int, log func() *replicatedLog) {
	if testing.Short() {
		seeds /= 15
	}
	first := setting("POSTHORN_SIMULATION_SEED", 1)
	seeds = setting("POSTHORN_SIMULATION_SEEDS", seeds)
	all := &tally{results: map[string]map[witness.Result]int{}, rounds: map[string]int{}, failed: map[string]int{}}
	t.Cleanup(func() { all.check(t, seeds) })
	for seed := first; seed < first+seeds; seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			t.Logf("to reproduce: POSTHORN_SIMULATION_SEED=%d POSTHORN_SIMULATION_SEEDS=1", seed)
			plan := newPlan(uint64(seed), log != nil)
			verdicts := simulate(t, uint64(seed), plan, log)
			all.add(plan, verdicts)
			for _, v := range verdicts {
				if fails(v) {
					t.Errorf("%v", v)
				}
			}
		})
	}
}

// always are the clauses that hold in each plan, and sometimes those about which not every plan has a line. The other one,
// denied, needs sockets.
var (
	always    = []string{"outcome", "accepted", "refusal", "config", "signed", "bytes", "urls", "window", "wait", "ids", "ledger"}
	sometimes = []string{"repeats", "isolation", "fall", "once", "status", "ready"}
)

// tally counts the verdicts of all plans, and the steps of each kind, of which some were in a plan that failed.
type tally struct {
	sync.Mutex
	results        map[string]map[witness.Result]int
	rounds, failed map[string]int
}

func (a *tally) add(plan []step, verdicts []witness.Verdict) {
	a.Lock()
	defer a.Unlock()
	for _, v := range verdicts {
		if a.results[v.Clause.ID] == nil {
			a.results[v.Clause.ID] = map[witness.Result]int{}
		}
		a.results[v.Clause.ID][v.Result]++
	}
	for _, s := range plan {
		name := kinds[s.kind].name
		if a.rounds[name]++; slices.ContainsFunc(verdicts, fails) {
			a.failed[name]++
		}
	}
}

// classes describes the rounds of each kind of step, how many of them failed, and the bound of the risk of a round for which
// the chance to see no failure is 5 %.
func (a *tally) classes() (text string) {
	for _, name := range slices.Sorted(maps.Keys(a.rounds)) {
		text += fmt.Sprintf("; %s: %d rounds, %d failed, bound %.2g", name, a.rounds[name], a.failed[name], 3/float64(a.rounds[name]))
	}
	return text
}

// check reports the clauses that hold in too few plans to be tested.
func (a *tally) check(t *testing.T, seeds int) {
	for _, id := range sometimes {
		if holds := a.results[id][witness.Holds]; seeds >= 100 && holds < seeds/10 {
			t.Errorf("clause %s: got %d plans in which it holds, want a tenth of %d or more", id, holds, seeds)
		}
	}
	t.Logf("verdicts by clause: %v", a.results)
	t.Logf("%d plans%s", seeds, a.classes())
}

// simulate runs a plan in virtual time.
func simulate(t *testing.T, seed uint64, plan []step, log func() *replicatedLog) (verdicts []witness.Verdict) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, seed, log)
		verdicts = w.run(plan)
	})
	return verdicts
}

func setting(name string, normal int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return normal
}
