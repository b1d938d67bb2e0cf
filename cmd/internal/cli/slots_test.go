package cli

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

func TestSlots(t *testing.T) {
	now := time.Now()
	owner := adminapi.ReplicationState{Pod: "dispatcher-0", Owner: true, Ready: true, MaySend: true, Epoch: 3, Sequence: 120, Bytes: 12e5,
		MaxBytes: 4e9, Snapshot: now.Add(-5 * time.Minute)}
	standby := adminapi.ReplicationState{Pod: "dispatcher-1", Ready: true, Sequence: 118, OwnerName: "dispatcher-0 (10.0.0.7:8444)"}
	with := func(s adminapi.ReplicationState, change func(*adminapi.ReplicationState)) adminapi.ReplicationState {
		change(&s)
		return s
	}
	in := func(slot int, s adminapi.ReplicationState) adminapi.ReplicationState {
		return with(s, func(s *adminapi.ReplicationState) { s.Slot = slot })
	}
	var table strings.Builder
	ahead := in(1, with(owner, func(s *adminapi.ReplicationState) { s.Sequence = 500 }))
	run := in(2, with(standby, func(s *adminapi.ReplicationState) { s.Pod = "10.0.0.8:8444" }))
	heard := with(in(2, adminapi.ReplicationState{Pod: "10.0.0.9:8444"}), func(s *adminapi.ReplicationState) { s.Heard = true })
	(&replication{number: 3, states: []adminapi.ReplicationState{owner, standby, ahead, run, heard}}).print(&table, now)
	want := []string{
		"SLOT PROCESS ROLE READY EPOCH RECORD BEHIND STREAM LAST SNAPSHOT",
		"0 dispatcher-0 owner true 3 120 0 1.2 MB of 4000.0 MB 5m ago",
		"0 dispatcher-1 standby true - 118 2 - -",
		"1 dispatcher-0 owner true 3 500 0 1.2 MB of 4000.0 MB 5m ago",
		"2 - no owner false - - - - -",
		"2 10.0.0.8:8444 standby true - 118 0 - -",
		"2 10.0.0.9:8444 standby false - - - - -",
	}
	for i, line := range strings.Split(strings.TrimSpace(table.String()), "\n") {
		if got := strings.Join(strings.Fields(line), " "); i >= len(want) || got != want[i] {
			t.Errorf("line %d: got %q, want %q", i, got, want)
		}
	}
	for name, c := range map[string]struct {
		states []adminapi.ReplicationState
		number int
		want   int // standbys
		fails  bool
		text   string
	}{
		"owner and standby":   {[]adminapi.ReplicationState{owner, standby}, 1, 1, false, ""},
		"owner alone":         {[]adminapi.ReplicationState{owner}, 1, 1, true, "the slot has 0 of 1 standby; start another process with this log."},
		"a standby too few":   {[]adminapi.ReplicationState{owner, standby, in(1, owner), in(1, standby), in(1, run)}, 2, 2, true, "slot 0 has 1 of 2 standbys; start another process with this log."},
		"standbys alone":      {[]adminapi.ReplicationState{standby, standby}, 1, 1, true, "no process owns the slot; another one takes it over within about 15 s."},
		"log does not answer": {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) { s.MaySend = false })}, 1, 0, true, "dispatcher-0 owns the slot and cannot deliver: the log does not answer."},
		"weak settings": {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) {
			s.Weak = []string{"stream PH_x_W0 has num_replicas 1; set it to 3"}
		})}, 1, 0, true, "stream PH_x_W0 has num_replicas 1; set it to 3."},
		"a disabled server": {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) {
			s.Disabled = []string{"JetStream is disabled in n0: check its disk, restart it"}
		})}, 1, 0, true, "JetStream is disabled in n0: check its disk, restart it."},
		"a lost server":       {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) { s.Replicas, s.CurrentReplicas = 3, 2 })}, 1, 0, true, "2 of 3 servers of the log have all records; start the others, or wait until they have caught up."},
		"a gap":               {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) { s.Gaps = []string{"server n1 lacks 458 records: stop it"} })}, 1, 0, true, "server n1 lacks 458 records: stop it."},
		"unknown sync":        {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) { s.Sync = "Unknown" })}, 1, 0, false, "It is not known whether the servers sync each record (sync_interval: always): set --replication-monitoring, in the chart replication.jetStream.monitoringURL."},
		"owners of two slots": {[]adminapi.ReplicationState{owner, in(1, owner)}, 2, 0, false, ""},
		"a lost server of several slots": {[]adminapi.ReplicationState{
			with(owner, func(s *adminapi.ReplicationState) { s.Replicas, s.CurrentReplicas = 3, 2 }),
			in(1, with(owner, func(s *adminapi.ReplicationState) { s.MaySend = false })),
			in(2, with(owner, func(s *adminapi.ReplicationState) { s.Replicas, s.CurrentReplicas = 3, 2 })),
		}, 3, 0, true, "2 of 3 servers of the log have all records; start the others, or wait until they have caught up.\ndispatcher-0 owns slot 1 and cannot deliver: the log does not answer."},
		"slot without owner": {[]adminapi.ReplicationState{owner, in(2, standby), in(2, standby)}, 3, 0, true, "no process owns slot 1; another one takes it over within about 15 s.\nno process owns slot 2; another one takes it over within about 15 s."},
		"clock of an owner":  {[]adminapi.ReplicationState{with(owner, func(s *adminapi.ReplicationState) { s.Clock = "the clock is wrong: correct it" })}, 1, 0, true, "dispatcher-0: the clock is wrong: correct it."},
		"clock of a standby": {[]adminapi.ReplicationState{owner, with(standby, func(s *adminapi.ReplicationState) {
			s.Ready, s.Reason, s.Clock = false, "the clock is wrong", "the clock is wrong"
		})}, 1, 1, true, "dispatcher-1 is not ready: the clock is wrong."},
		"standby not ready": {[]adminapi.ReplicationState{owner, with(standby, func(s *adminapi.ReplicationState) { s.Ready, s.Reason = false, "connecting to the log" })}, 1, 1, true, "dispatcher-1 is not ready: connecting to the log."},
	} {
		var out strings.Builder
		err := (&replication{states: c.states, number: c.number, standbys: c.want}).printProblems(&out)
		if got := strings.TrimSpace(out.String()); got != c.text || (err != nil) != c.fails {
			t.Errorf("%s: got %q and error %v, want %q, failed %v", name, got, err, c.text, c.fails)
		}
	}
}

// A process with several slots that has none yet is not one without a log, and is not ready.
func TestProcessWithoutSlots(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slots":
			_, _ = io.WriteString(w, "[]")
		case "/report":
			_, _ = io.WriteString(w, `{"pod":"dispatcher-0","ready":false,"replication":{"number":6}}`)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	cmd := newSlots(connectDirect)
	var out strings.Builder
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs([]string{"--admin", server.URL})
	if err := cmd.Execute(); !errors.Is(err, command.ErrFailed) ||
		!strings.Contains(out.String(), "dispatcher-0 is not ready: its /readyz has the reason.") {
		t.Errorf("got error %v and %q, want a failure and that the process is not ready", err, out.String())
	}
}

// The role of the process that was asked.
func TestRole(t *testing.T) {
	owner, standby := adminapi.ReplicationState{Pod: "a", Owner: true}, adminapi.ReplicationState{Pod: "b"}
	for name, c := range map[string]struct {
		log  replication
		want string
	}{
		"no log":        {replication{}, ""},
		"several slots": {replication{number: 2, asked: "a", states: []adminapi.ReplicationState{owner}}, ""},
		"owner":         {replication{number: 1, asked: "a", states: []adminapi.ReplicationState{owner, standby}}, "owner a; 1 standby"},
		"standby":       {replication{number: 1, asked: "b", states: []adminapi.ReplicationState{owner, standby, standby}}, "standby b of the owner a; 2 standbys"},
		"no owner": {replication{number: 1, asked: "b", states: []adminapi.ReplicationState{standby}},
			"standby b, without an owner; 1 standby"},
	} {
		if got := c.log.role(); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// oneStore is the admin API of a process with one store: next answers all requests except those that ask
// for the stores.
func oneStore(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slots":
			http.NotFound(w, r)
		default:
			next(w, r)
		}
	})
}

// The process at an address forwards the requests to the owners of all slots.
func TestProcessOfALog(t *testing.T) {
	attempt := func(slot string) string { return `{"destination":"shop/crm","messageId":"of-` + slot + `"}` + "\n" }
	for name, c := range map[string]struct {
		slots        string
		want, absent string
	}{
		"some of the slots": {slots: `[{"slot":1,"owner":true},{"slot":2}]`, want: "of-2", absent: "of-3"},
		"none of the slots": {slots: "[]", want: "of-0"},
	} {
		t.Run(name, func(t *testing.T) {
			mux := http.NewServeMux()
			mux.HandleFunc("GET /slots", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, c.slots) })
			mux.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, `{"pod":"dispatcher-0","ready":true,"replication":{"number":3}}`)
			})
			mux.HandleFunc("GET /slots/{slot}/attempts", func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.WriteString(w, attempt(r.PathValue("slot")))
			})
			server := httptest.NewServer(mux)
			defer server.Close()
			var out, problems strings.Builder
			if code := execute(strings.Fields("attempts crm -n shop -o json --admin "+server.URL), strings.NewReader(""), &out,
				&problems); code != 0 {
				t.Fatalf("got exit code %d and %q, want 0", code, problems.String())
			}
			if !strings.Contains(out.String(), c.want) || c.absent != "" && strings.Contains(out.String(), c.absent) {
				t.Errorf("got %s, want %s and not %s", out.String(), c.want, c.absent)
			}
		})
	}
}

// A request whose owner does not answer fails with the answer of the process at the address.
func TestProcessWithoutAnOwner(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slots":
			_, _ = io.WriteString(w, `[{"slot":0,"pod":"dispatcher-0"}]`)
		case "/report":
			_, _ = io.WriteString(w, `{"pod":"dispatcher-0","ready":true,"replication":{"number":1}}`)
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "no process owns the slot at the moment")
		}
	}))
	defer server.Close()
	var out, problems strings.Builder
	if code := execute([]string{"deadletters", "list", "crm", "--admin", server.URL}, strings.NewReader(""), &out, &problems); code != command.ExitFailure || !strings.Contains(problems.String(), "no process owns the slot") {
		t.Errorf("got exit code %d and %q, want %d and the answer", code, problems.String(), command.ExitFailure)
	}
}
