// Package simulation joins the whole data plane in one process, in virtual time, and lets everything around it fail.
package simulation

import (
	"fmt"
	"os"
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
func TestRandomPlansOfSeveralProcesses(t *testing.T) { runPlans(t, 60, newReplicatedLog) }

// runPlans runs a number of plans; with a log, of three processes.
func runPlans(t *testing.T, seeds int, log func() *replicatedLog) {
	if testing.Short() {
		seeds /= 15
	}
	first := setting("POSTHORN_SIMULATION_SEED", 1)
	seeds = setting("POSTHORN_SIMULATION_SEEDS", seeds)
	all := &tally{results: map[string]map[witness.Result]int{}}
	t.Cleanup(func() { all.check(t, seeds) })
	for seed := first; seed < first+seeds; seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			t.Logf("to reproduce: POSTHORN_SIMULATION_SEED=%d POSTHORN_SIMULATION_SEEDS=1", seed)
			for _, v := range simulate(t, uint64(seed), newPlan(uint64(seed)), log) {
				if all.add(v); fails(v) {
					t.Errorf("%v", v)
				}
			}
		})
	}
}

// always are the clauses that hold in each plan, and sometimes those about which not every plan has a line. Package
// witness has the others: denied and status need sockets and a control plane.
var (
	always    = []string{"outcome", "accepted", "refusal", "config", "signed", "bytes", "urls", "window", "wait", "ids", "ledger"}
	sometimes = []string{"repeats", "isolation", "fall", "once", "ready"}
)

// tally counts the verdicts of all plans.
type tally struct {
	sync.Mutex
	results map[string]map[witness.Result]int
}

func (a *tally) add(v witness.Verdict) {
	a.Lock()
	defer a.Unlock()
	if a.results[v.Clause.ID] == nil {
		a.results[v.Clause.ID] = map[witness.Result]int{}
	}
	a.results[v.Clause.ID][v.Result]++
}

// check reports the clauses that hold in too few plans to be tested.
func (a *tally) check(t *testing.T, seeds int) {
	for _, id := range sometimes {
		if holds := a.results[id][witness.Holds]; seeds >= 100 && holds < seeds/10 {
			t.Errorf("clause %s: got %d plans in which it holds, want a tenth of %d or more", id, holds, seeds)
		}
	}
	t.Logf("%d plans; verdicts by clause: %v", seeds, a.results)
}

// simulate runs a plan in virtual time. The journals are kept if the test has failed.
func simulate(t *testing.T, seed uint64, plan []step, log func() *replicatedLog) (verdicts []witness.Verdict) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, seed, log)
		verdicts = w.run(plan)
		if len(violated(verdicts)) > 0 || t.Failed() {
			t.Logf("the journals are in %s", w.dir)
		} else {
			_ = os.RemoveAll(w.dir)
		}
	})
	return verdicts
}

// violated returns the ids of the clauses that are violated.
func violated(verdicts []witness.Verdict) (ids []string) {
	for _, v := range verdicts {
		if v.Result == witness.Violated {
			ids = append(ids, v.Clause.ID)
		}
	}
	return ids
}

func setting(name string, normal int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return normal
}
