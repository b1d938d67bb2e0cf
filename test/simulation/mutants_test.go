package simulation

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// mutant is a defect: a line of the product and its replacement.
type mutant struct {
	name, file, line, replacement string
	// find is the test that finds it.
	find *search
}

// search is a test of a package, which a variable gives a number of trials.
type search struct{ folder, test, variable string }

var (
	plans   = &search{"test/simulation", "TestRandomPlans", "POSTHORN_SIMULATION_SEEDS"}
	several = &search{"test/simulation", "TestRandomPlansOfSeveralProcesses", "POSTHORN_SIMULATION_SEEDS"}
	model   = &search{"dispatcher/replicated/slots", "TestModel", "POSTHORN_MODEL_SEEDS"}
)

// mutants are defects that tests with random trials find.
var mutants = []mutant{
	{"acknowledge before the sync", "dispatcher/queue/pebblestore/commitlog.go", "	err = l.db.ApplyNoSyncWait(b, pebble.Sync)",
		"	l.flusher.markUnsynced()\n	return func() error { return nil }, l.db.Apply(b, pebble.NoSync)", plans},
	{"forget a lease", "dispatcher/delivery/settle.go", "		s.store.Retry(p.message, decision.At, f)",
		"		if p.message.Seq%8 > 0 { s.store.Retry(p.message, decision.At, f) }", plans},
	{"sign with the old Secret after confirmation", "dispatcher/delivery/destination.go", "		s.signer, err = sign.New(c.Signing)",
		"		if s.signer, err = sign.New(c.Signing); old != nil && old.active { s.signer = old.signer }", plans},
	{"count twice", "dispatcher/queue/pebblestore/group.go", "	if first, err = s.markFinal(g, d.Seq); !first || err != nil {",
		"	if first, err = s.markFinal(g, d.Seq); first && d.Attempt > 0 { g.Delivered++ } else if !first || err != nil {", plans},
	{"an old config after a restart", "dispatcher/intake/admission/configs.go",
		"	if number := live.Head.Number; err == nil && number > 0 && number < before.Number {", "	if number := live.Head.Number; err == nil && number < 0 {", plans},
	{"a lost dead letter", "dispatcher/queue/pebblestore/deadletter.go", "	v := codec.AppendDeadLetter(make([]byte, 0, len(letter.Body)+512), letter)",
		"	v := codec.AppendDeadLetter(make([]byte, 0, len(letter.Body)+512), letter)\n	if letter.Seq%8 == 0 { l.Buried++; return }", plans},
	{"a retry past the window", "dispatcher/delivery/destination.go",
		"		policy: retry.Policy{Window: c.Delivery.RetryWindow(), MinBackoff: c.Delivery.MinBackoff(), MaxBackoff: c.Delivery.MaxBackoff(),",
		"		policy: retry.Policy{Window: 10 * c.Delivery.RetryWindow(), MinBackoff: c.Delivery.MinBackoff(), MaxBackoff: c.Delivery.MaxBackoff(),", plans},
	{"results are recorded late", "dispatcher/queue/pebblestore/flush.go", "		case <-time.After(s.o.FlushInterval):",
		"		case <-time.After(40 * s.o.FlushInterval):", plans},
	{"one key of two messages", "analytics/event/event.go",
		`func (id ID) Key() string { return strings.ReplaceAll(url.QueryEscape(string(id)), "+", "%20") }`,
		`func (id ID) Key() string { return strings.NewReplacer("+", "%20", "%2B", "%20").Replace(url.QueryEscape(string(id))) }`, plans},
	{"duplicates are accepted", "dispatcher/queue/pebblestore/append.go", "			if dup {", "			if dup && false {", plans},
	{"a circuit without probes", "dispatcher/delivery/endpoint/endpoint.go", "	return m.open && !m.probing && !now.Before(m.probeAt)",
		"	return m.open && !m.probing && !now.Before(m.probeAt.Add(2*time.Minute))", plans},
	{"a filter excludes the notification of a deletion", "dispatcher/jobs/deletion/deletion.go",
		"			if !to.IgnoreDeletions && slices.Contains(to.Sources, c.Name) {",
		"			if to.Filter == nil && slices.Contains(to.Sources, c.Name) {", plans},
	{"a purged stream is not replaced", "dispatcher/replicated/slots/snapshot.go", "	if state.First > s.needed {",
		"	if state.First == 0 {", several},
	{"lost snapshots are not replaced", "dispatcher/replicated/slots/snapshot.go", "	if len(missing) > 0 {",
		"	if len(missing) < 0 {", several},
	{"join the log of another installation", "dispatcher/replicated/slots/installation.go", `	if recorded == "" || recorded == own {`,
		`	if recorded != "-" || recorded == own {`, several},
	{"a process with a wrong clock owns a slot", "dispatcher/replicated/slots/placement.go", "	if m.ClockSkew.Abs() <= MaxClockSkew {",
		"	if m.ClockSkew.Abs() >= 0 {", several},
	{"adopt the files of an earlier owner", "dispatcher/replicated/slots/adopt.go",
		"	if useFiles && former.Epoch > 0 && former.Epoch < epoch && last.Session == former.session() {", "	if former.Epoch < 0 {", several},
	{"a process without servers is ready", "dispatcher/replicated/host/ready.go",
		"	if at := h.heardAt.Load(); at != 0 && time.Since(h.started)-time.Duration(at) > cutOffAfter {",
		"	if at := h.heardAt.Load(); at != 0 && time.Since(h.started)-time.Duration(at) > 360*cutOffAfter {", several},
	{"a retry window includes suspensions", "dispatcher/delivery/suspension.go", "		if one = one.until(now); accepted.Before(one.To) {",
		"		if one = one.until(now); accepted.Before(one.To) && now.IsZero() {", plans},
	{"a restart forgets suspensions", "dispatcher/delivery/records.go",
		"	} else if key, ok := strings.CutPrefix(name, suspensionPrefix); ok && json.Unmarshal(value, &s) == nil {",
		"	} else if key, ok := strings.CutPrefix(name, suspensionPrefix); ok && key == \"\" {", plans},
	{"no grace period", "dispatcher/delivery/orphans.go", "		l.dropAt = l.removedAt.Add(o.grace)", "		l.dropAt = l.removedAt", plans},
	{"drop a destination that is restored", "dispatcher/delivery/lane.go", "		l.dropAt = time.Time{}", "		_ = l.dropAt", plans},
	{"send omitted messages", "dispatcher/delivery/shape/shape.go", "		return Request{Omitted: true}, nil",
		"		return Request{Line: s.line, Body: m.Body}, nil", plans},
	{"redact retries only", "dispatcher/delivery/redact.go", "	body, matched, err = s.redaction.redactor.Apply(d.Body)",
		"	if body = d.Body; d.Attempt > 1 { body, matched, err = s.redaction.redactor.Apply(d.Body) }", plans},
	{"skip the fence", "dispatcher/replicated/slots/publisher.go",
		`		p.end(fmt.Errorf("record %d is a %v of session %x, epoch %d", e.Sequence, h.kind, h.session, h.epoch))`, "		p.expected = e.Sequence", model},
	{"a lease of a slot five seconds too long", "dispatcher/replicated/slots/publisher.go",
		"	return p.ended == nil && !p.releasing && now.Sub(p.leaseStart) < leaseTime",
		"	return p.ended == nil && !p.releasing && now.Sub(p.leaseStart) < leaseTime+5*time.Second", model},
	{"forget the lease of a slot", "dispatcher/replicated/slots/publisher.go", "	return p.hasLease(now) && now.Sub(p.oldest(now)) < refuseAfter",
		"	return p.ended == nil && !p.releasing", model},
}

// each line of a mutant is in its file once.
func TestMutantsApply(t *testing.T) {
	t.Parallel()
	for _, m := range mutants {
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		check.NoError(t, "read the file of the mutant "+m.name, err)
		check.Equal(t, "lines of the mutant "+m.name, strings.Count("\n"+string(text), "\n"+m.line+"\n"), 1)
	}
}

// TestMutants prints, for each mutant, the clauses of the witness that are violated, the first seed that finds it, and the
// number of seeds that do, of the number in POSTHORN_MUTANTS. Without it, nothing is run. POSTHORN_MUTANT selects those whose
// name contains a text.
func TestMutants(t *testing.T) {
	trials := setting("POSTHORN_MUTANTS", 0)
	if trials == 0 {
		t.Skip("POSTHORN_MUTANTS is not set")
	}
	for _, m := range mutants {
		if !strings.Contains(m.name, os.Getenv("POSTHORN_MUTANT")) {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			out := m.run(t, trials)
			found := describe(out)
			if found == "" {
				t.Errorf("trials that find the mutant: got none of %d, want some; output: %.3000s", trials, out)
			}
			t.Logf("| %s | `%s` | %s |", m.name, m.find.test, found)
		})
	}
}

// run runs the test that finds the mutant, and returns its output.
func (m mutant) run(t *testing.T, trials int) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	check.NoError(t, "find the repository", err)
	file := filepath.Join(root, m.file)
	text, err := os.ReadFile(file)
	check.NoError(t, "read the file", err)
	changed, overlay := filepath.Join(t.TempDir(), "changed.go"), filepath.Join(t.TempDir(), "overlay.json")
	check.NoError(t, "write the file", os.WriteFile(changed, []byte(strings.Replace(string(text), "\n"+m.line+"\n", "\n"+m.replacement+"\n", 1)), 0o600))
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{file: changed}})
	check.NoError(t, "encode the overlay", err)
	check.NoError(t, "write the overlay", os.WriteFile(overlay, replace, 0o600))
	command := exec.CommandContext(t.Context(), "go", "test", "-overlay", overlay, "-vet=off", "-run", m.find.test+"$", "-v", "-count=1",
		"-timeout", "30m", "./"+m.find.folder)
	command.Dir, command.Env = root, append(os.Environ(), fmt.Sprint(m.find.variable, "=", trials), "TMPDIR="+t.TempDir())
	text, _ = command.CombinedOutput() // It fails if the mutant is found.
	return string(text)
}

var (
	seedLine     = regexp.MustCompile(`--- FAIL: Test\w+/(?:seed_)?(\d+)`)
	violatedLine = regexp.MustCompile(`simulation_test\.go:\d+: (\w+): (violated|unclear)`)
	noStartLine  = regexp.MustCompile(`pod_test\.go:\d+: start of a process: got error`)
)

// describe returns the clauses that failed trials name, the first seed and the number of seeds; empty without a failure. A
// store that does not open ends all trials.
func describe(out string) string {
	if noStartLine.MatchString(out) {
		return "the store does not open | |"
	}
	var seeds []int
	for _, s := range seedLine.FindAllStringSubmatch(out, -1) {
		n, _ := strconv.Atoi(s[1]) // It has digits only.
		seeds = append(seeds, n)
	}
	if len(seeds) == 0 {
		return ""
	}
	var clauses []string
	for _, c := range violatedLine.FindAllStringSubmatch(out, -1) {
		if name := "`" + c[1] + "` " + c[2]; !slices.Contains(clauses, name) {
			clauses = append(clauses, name)
		}
	}
	slices.Sort(clauses)
	return fmt.Sprintf("%s | %d | %d", strings.Join(clauses, ", "), slices.Min(seeds), len(seeds))
}
