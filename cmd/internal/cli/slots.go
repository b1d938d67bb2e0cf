package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// allConnector also connects to the standbys of a replicated log.
type allConnector interface {
	connectAll(ctx context.Context) (targets []target, closeAll func(), err error)
}

func (d *direct) connectAll(context.Context) ([]target, func(), error) {
	t, err := d.target()
	return []target{t}, func() {}, err
}

// newSlots makes the command that shows the owners and the standbys of a replicated log.
func newSlots(flags connectorFlags) *cobra.Command {
	var r connector
	var output string
	cmd := &cobra.Command{
		Use:   "slots",
		Short: "Show the owners and the standbys of a replicated log",
		Long: `Shows which dispatcher owns the messages of each slot of a replicated log (--replication-url), and how
many records the standbys are behind. It exits 1 if a slot has no owner, if an owner
cannot deliver, if a process is not ready, if the log or the copy of one of its servers lacks records,
or if a setting of the servers can lose calls.`,
		Example: `  posthorn slots
  posthorn slots -o json`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return command.Usagef("-o %q: use json", output)
			}
			targets, closeAll, err := r.(allConnector).connectAll(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			states, number, unready, err := logStates(cmd.Context(), targets)
			if err != nil {
				return err
			}
			if number == 0 {
				return errors.New("there is no replicated log: the calls are durable in the data directories")
			}
			if output == "json" {
				out := json.NewEncoder(cmd.OutOrStdout())
				for _, s := range states {
					if err := out.Encode(s); err != nil {
						return err
					}
				}
				return slotsProblem(io.Discard, states, number, len(targets), unready...)
			}
			printSlots(cmd.OutOrStdout(), states, time.Now())
			return slotsProblem(cmd.OutOrStdout(), states, number, len(targets), unready...)
		},
	}
	r = flags(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "", "json: one line of JSON per process")
	return cmd
}

// logStates returns the parts of the processes in the log, sorted by slot, the number of slots, which is 0 without a
// log, and the names of the processes that are not ready for another reason than those of their slots. A process that is asked alone also gets the parts
// of the owners of the other slots.
func logStates(ctx context.Context, targets []target) (states []adminapi.ReplicationState, number int, unready []string, err error) {
	for _, t := range targets {
		of, err := t.Slots(ctx)
		if err != nil {
			return nil, 0, nil, t.explain(err)
		}
		if of == nil {
			continue
		}
		r, err := t.Report(ctx, "")
		if err != nil {
			return nil, 0, nil, t.explain(err)
		}
		number = max(number, r.Replication.Number)
		if !r.Ready && !slices.ContainsFunc(of, func(s adminapi.ReplicationState) bool { return !s.Ready }) {
			unready = append(unready, cmp.Or(t.pod, r.Pod, "the process"))
		}
		for _, s := range of {
			s.Pod = cmp.Or(t.pod, s.Pod)
			states = append(states, s)
		}
	}
	if len(targets) == 1 {
		for slot := range number {
			if slices.ContainsFunc(states, func(s adminapi.ReplicationState) bool { return s.Slot == slot && s.Owner }) {
				continue
			}
			if of, err := targets[0].Slot(slot).Slots(ctx); err == nil { // The owner may not answer.
				states = append(states, of...)
			}
		}
	}
	slices.SortStableFunc(states, func(a, b adminapi.ReplicationState) int { return cmp.Compare(a.Slot, b.Slot) })
	return states, number, unready, nil
}

// printSlots prints one line per slot and process.
func printSlots(w io.Writer, states []adminapi.ReplicationState, now time.Time) {
	last := map[int]uint64{}
	for _, s := range states {
		last[s.Slot] = max(last[s.Slot], s.Sequence)
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "SLOT\tPROCESS\tROLE\tREADY\tEPOCH\tRECORD\tBEHIND\tSTREAM\tLAST SNAPSHOT")
	for _, s := range states {
		role, epoch, stream, snapshot := "standby", "-", "-", "-"
		if s.Owner {
			role, epoch, stream = "owner", fmt.Sprint(s.Epoch), megabytes(s.Bytes)
			if s.MaxBytes > 0 {
				stream = fmt.Sprintf("%s of %s", stream, megabytes(s.MaxBytes))
			}
			if !s.Snapshot.IsZero() {
				snapshot = duration.HumanDuration(now.Sub(s.Snapshot)) + " ago"
			}
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%v\t%s\t%d\t%d\t%s\t%s\n", s.Slot, cmp.Or(s.Pod, "-"), role, s.Ready, epoch, s.Sequence, last[s.Slot]-s.Sequence, stream, snapshot)
	}
	_ = table.Flush() // An error of w also ends the command's later output.
}

// unique returns the texts without repetitions, in order.
func unique(texts []string) (list []string) {
	for _, text := range texts {
		if !slices.Contains(list, text) {
			list = append(list, text)
		}
	}
	return list
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// slotsProblem prints what is wrong with a log of a number of slots; its error makes the command exit 1.
func slotsProblem(w io.Writer, states []adminapi.ReplicationState, number, asked int, unready ...string) error {
	var problems []string
	for _, name := range unready {
		problems = append(problems, name+" is not ready: its /readyz has the reason")
	}
	owned := map[int]bool{}
	for _, s := range states {
		name := cmp.Or(s.Pod, "the process")
		slot := "the slot"
		if number > 1 {
			slot = fmt.Sprintf("slot %d", s.Slot)
		}
		if s.Owner {
			owned[s.Slot] = true
			if !s.MaySend {
				problems = append(problems, fmt.Sprintf("%s owns %s and cannot deliver: the log does not answer", name, slot))
			}
			problems = append(append(problems, s.Weak...), s.Disabled...)
			for _, gap := range s.Gaps {
				if number > 1 {
					gap = slot + ": " + gap
				}
				problems = append(problems, gap)
			}
			if s.CurrentReplicas < s.Replicas {
				problems = append(problems, fmt.Sprintf("%d of %d servers of the log have all records; start the others, or wait until they have caught up", s.CurrentReplicas, s.Replicas))
			}
		}
		if s.Clock != "" && s.Clock != s.Reason {
			problems = append(problems, name+": "+s.Clock)
		}
		if !s.Ready {
			problems = append(problems, name+" is not ready: "+s.Reason)
		}
	}
	for slot := range number {
		if owned[slot] {
			continue
		}
		// A single process can be a standby of an owner that was not asked.
		known := slices.IndexFunc(states, func(s adminapi.ReplicationState) bool { return s.Slot == slot && s.OwnerName != "" })
		switch {
		case known >= 0 && asked == 1 && number == 1:
			fmt.Fprintf(w, "\nThe owner is %s.\n", states[known].OwnerName)
		case known >= 0 && asked == 1:
			fmt.Fprintf(w, "\nThe owner of slot %d is %s.\n", slot, states[known].OwnerName)
		case number == 1:
			problems = append(problems, "no process owns the slot; a standby takes over within about 15 s")
		case asked > 1:
			problems = append(problems, fmt.Sprintf("no process owns slot %d; another one takes it over within about 15 s", slot))
		}
	}
	problems = unique(problems) // Several slots have the same server that lacks records.
	if slices.ContainsFunc(states, func(s adminapi.ReplicationState) bool { return s.Sync == "Unknown" }) {
		fmt.Fprintln(w, "\nIt is not known whether the servers sync each record (sync_interval: always): set --replication-monitoring, in the chart replication.jetStream.monitoringURL.")
	}
	if len(problems) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	for _, p := range problems {
		fmt.Fprintln(w, sentence(p))
	}
	return command.ErrFailed
}
