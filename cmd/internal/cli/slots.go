package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/internal/plural"
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
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "slots",
		Short: "Show the owners and the standbys of a replicated log",
		Long: `Shows which dispatcher owns the messages of each slot of a replicated log (--replication-url), and how
many records the standbys are behind. It exits 1 if a slot has no owner or fewer standbys than it
should have, if an owner cannot deliver, if a process is not ready, if the log or the copy of one of
its servers lacks records, or if a setting of the servers can lose calls.`,
		Example: `  posthorn slots
  posthorn slots -o json`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			targets, closeAll, err := r.(allConnector).connectAll(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			log, err := readReplication(cmd.Context(), targets)
			if err != nil {
				return err
			}
			if log.number == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "There is no replicated log: the calls are durable in the data directories.")
				return nil
			}
			if objects.Chosen() {
				if err := command.PrintAll(cmd.OutOrStdout(), objects, log.states); err != nil {
					return err
				}
				return log.printProblems(io.Discard)
			}
			log.print(cmd.OutOrStdout(), time.Now())
			return log.printProblems(cmd.OutOrStdout())
		},
	}
	r = flags(cmd)
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// replication is a replicated log.
type replication struct {
	// states are the parts of the processes in the log, sorted by slot.
	states []adminapi.ReplicationState
	// number is the number of slots; 0 without a log. standbys is the least number of copies of each slot beside its
	// owner's store.
	number, standbys int
	// asked is the name of the process that was asked; empty if it has no slot, or if there are several.
	asked string
	// unready are the processes that are not ready for another reason than their slots'.
	unready []string
}

// readReplication reads the parts of processes in the log. One that is asked alone also gives the parts of the others.
func readReplication(ctx context.Context, targets []target) (log replication, err error) {
	for _, t := range targets {
		of, err := t.AllSlots(ctx)
		if err != nil {
			return log, t.explain(err)
		}
		if of == nil {
			continue
		}
		r, err := t.Report(ctx, "")
		if err != nil {
			return log, t.explain(err)
		}
		if len(targets) > 1 {
			of = slices.DeleteFunc(of, func(s adminapi.ReplicationState) bool { return s.Heard })
		}
		log.number, log.standbys = max(log.number, r.Replication.Number), max(log.standbys, r.Replication.Standbys)
		if !r.Ready && !slices.ContainsFunc(of, func(s adminapi.ReplicationState) bool { return !s.Ready && !s.Heard }) {
			log.unready = append(log.unready, cmp.Or(t.pod, r.Pod, "the process"))
		}
		for _, s := range of {
			if !s.Heard {
				s.Pod = cmp.Or(t.pod, s.Pod)
				log.asked = s.Pod
			}
			log.states = append(log.states, s)
		}
	}
	for i, s := range log.states {
		if !s.Owner || !s.Heard {
			continue
		}
		if of, err := targets[0].Slot(s.Slot).Slots(ctx); err == nil && len(of) == 1 { // The owner may not answer.
			log.states[i] = of[0]
		}
	}
	slices.SortStableFunc(log.states, func(a, b adminapi.ReplicationState) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), strings.Compare(a.Pod, b.Pod))
	})
	return log, nil
}

// owner returns the part of the owner of a slot; nil for none.
func (l *replication) owner(slot int) *adminapi.ReplicationState {
	for i, s := range l.states {
		if s.Slot == slot && s.Owner {
			return &l.states[i]
		}
	}
	return nil
}

// copies returns the number of standbys with a copy of a slot.
func (l *replication) copies(slot int) (n int) {
	for _, s := range l.states {
		if s.Slot == slot && !s.Owner {
			n++
		}
	}
	return n
}

// role describes the part of the process that was asked, in a log with one slot; empty without a log.
func (l *replication) role() string {
	if l.number != 1 || l.asked == "" {
		return ""
	}
	role := "standby " + l.asked + ", without an owner"
	switch owner := l.owner(0); {
	case owner != nil && owner.Pod == l.asked:
		role = "owner " + l.asked
	case owner != nil:
		role = "standby " + l.asked + " of the owner " + owner.Pod
	}
	return fmt.Sprintf("%s; %s", role, plural.Count(l.copies(0), "standby"))
}

// stream returns the bytes in the streams of the slots, and their maximum; 0 if it is not known.
func (l *replication) stream() (used, most int64) {
	for _, s := range l.states {
		used, most = used+s.Bytes, most+s.MaxBytes
	}
	return used, most
}

// print prints one line per slot and process, and one for a slot without owner.
func (l *replication) print(w io.Writer, now time.Time) {
	last := map[int]uint64{}
	for _, s := range l.states {
		last[s.Slot] = max(last[s.Slot], s.Sequence)
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "SLOT\tPROCESS\tROLE\tREADY\tEPOCH\tRECORD\tBEHIND\tSTREAM\tLAST SNAPSHOT")
	for slot := range l.number {
		if l.owner(slot) == nil {
			fmt.Fprintf(table, "%d\t-\tno owner\tfalse\t-\t-\t-\t-\t-\n", slot)
		}
		for _, s := range l.states {
			if s.Slot == slot {
				printPart(table, s, last[slot], now)
			}
		}
	}
	_ = table.Flush() // An error of w also ends the command's later output.
}

// printPart prints the line of a process in a slot, whose last record is known.
func printPart(w io.Writer, s adminapi.ReplicationState, last uint64, now time.Time) {
	role, epoch, record, behind, stream, snapshot := "standby", "-", "-", "-", "-", "-"
	if !s.Heard {
		record, behind = fmt.Sprint(s.Sequence), fmt.Sprint(last-s.Sequence)
	}
	if s.Owner {
		role = "owner"
	}
	if s.Owner && !s.Heard {
		epoch, stream = fmt.Sprint(s.Epoch), megabytes(s.Bytes)
		if s.MaxBytes > 0 {
			stream = fmt.Sprintf("%s of %s", stream, megabytes(s.MaxBytes))
		}
		if !s.Snapshot.IsZero() {
			snapshot = duration.HumanDuration(now.Sub(s.Snapshot)) + " ago"
		}
	}
	fmt.Fprintf(w, "%d\t%s\t%s\t%v\t%s\t%s\t%s\t%s\t%s\n", s.Slot, cmp.Or(s.Pod, "-"), role, s.Ready, epoch, record, behind, stream, snapshot)
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

// problems are what is wrong with the log.
func (l *replication) problems() (problems []string) {
	for _, name := range l.unready {
		problems = append(problems, name+" is not ready: its /readyz has the reason")
	}
	for _, s := range l.states {
		problems = append(problems, l.problemsOf(s)...)
	}
	for slot := range l.number {
		switch n := l.copies(slot); {
		case l.owner(slot) == nil:
			problems = append(problems, fmt.Sprintf("no process owns %s; another one takes it over within about 15 s", l.nameOf(slot)))
		case n < l.standbys:
			problems = append(problems, fmt.Sprintf("%s has %d of %s; start another process with this log", l.nameOf(slot), n, plural.Count(l.standbys, "standby")))
		}
	}
	return unique(problems) // Several slots have the same server that lacks records.
}

// nameOf names a slot.
func (l *replication) nameOf(slot int) string {
	if l.number == 1 {
		return "the slot"
	}
	return fmt.Sprintf("slot %d", slot)
}

// problemsOf are what is wrong with the part of a process.
func (l *replication) problemsOf(s adminapi.ReplicationState) (problems []string) {
	name := cmp.Or(s.Pod, "the process")
	if s.Owner {
		if !s.MaySend {
			problems = append(problems, fmt.Sprintf("%s owns %s and cannot deliver: the log does not answer", name, l.nameOf(s.Slot)))
		}
		problems = append(append(problems, s.Weak...), s.Disabled...)
		for _, gap := range s.Gaps {
			if l.number > 1 {
				gap = l.nameOf(s.Slot) + ": " + gap
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
	return problems
}

// printProblems prints what is wrong with the log; its error makes the command exit 1.
func (l *replication) printProblems(w io.Writer) error {
	if slices.ContainsFunc(l.states, func(s adminapi.ReplicationState) bool { return s.Sync == "Unknown" }) {
		fmt.Fprintln(w, "\nIt is not known whether the servers sync each record (sync_interval: always): set --replication-monitoring, in the chart replication.jetStream.monitoringURL.")
	}
	problems := l.problems()
	if len(problems) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	for _, p := range problems {
		fmt.Fprintln(w, sentence(p))
	}
	return command.ErrFailed
}
