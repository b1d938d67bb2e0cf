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
	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// allConnector also connects to the standbys of a replicated log.
type allConnector interface {
	connectAll(ctx context.Context) (targets []target, closeAll func(), err error)
}

func (d *direct) connectAll(ctx context.Context) ([]target, func(), error) { return d.connect(ctx) }

// newSlots makes the command that shows the owner and the standbys of a replicated log.
func newSlots(flags connectorFlags) *cobra.Command {
	var r connector
	var output string
	cmd := &cobra.Command{
		Use:   "slots",
		Short: "Show the owner and the standbys of a replicated log",
		Long: `Shows which dispatcher owns the messages in a replicated log (--log), and how many
records the standbys are behind. It exits 1 if there is no owner, if the owner
cannot deliver, if a process is not ready, if a server of the log lacks records, or if
a setting of the servers can lose calls.`,
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
			var states []adminapi.LogState
			for _, t := range targets {
				s, err := t.Log(cmd.Context())
				if err != nil {
					return t.explain(err)
				}
				if s != nil {
					s.Pod = cmp.Or(t.pod, s.Pod)
					states = append(states, *s)
				}
			}
			if len(states) == 0 {
				return errors.New("there is no replicated log: the calls are durable in the data directories")
			}
			if output == "json" {
				out := json.NewEncoder(cmd.OutOrStdout())
				for _, s := range states {
					if err := out.Encode(s); err != nil {
						return err
					}
				}
				return slotsProblem(io.Discard, states, len(targets))
			}
			printSlots(cmd.OutOrStdout(), states, time.Now())
			return slotsProblem(cmd.OutOrStdout(), states, len(targets))
		},
	}
	r = flags(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "", "json: one line of JSON per process")
	return cmd
}

// printSlots prints one line per process.
func printSlots(w io.Writer, states []adminapi.LogState, now time.Time) {
	last := uint64(0)
	for _, s := range states {
		last = max(last, s.Sequence)
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
		fmt.Fprintf(table, "%d\t%s\t%s\t%v\t%s\t%d\t%d\t%s\t%s\n", s.Slot, cmp.Or(s.Pod, "-"), role, s.Ready, epoch, s.Sequence, last-s.Sequence, stream, snapshot)
	}
	_ = table.Flush() // An error of w also ends the command's later output.
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// slotsProblem prints what is wrong; its error makes the command exit 1.
func slotsProblem(w io.Writer, states []adminapi.LogState, asked int) error {
	var problems []string
	owners := 0
	for _, s := range states {
		name := cmp.Or(s.Pod, "the process")
		if s.Owner {
			owners++
			if !s.MaySend {
				problems = append(problems, name+" owns the slot and cannot deliver: the log does not answer")
			}
			problems = append(problems, s.Weak...)
			if s.CurrentReplicas < s.Replicas {
				problems = append(problems, fmt.Sprintf("%d of %d servers of the log have all records; start the others, or wait until they have caught up", s.CurrentReplicas, s.Replicas))
			}
		}
		if !s.Ready {
			problems = append(problems, name+" is not ready: "+s.Reason)
		}
	}
	// A single process can be a standby of an owner that was not asked.
	if owners == 0 && (asked > 1 || states[0].OwnerName == "") {
		problems = append(problems, "no process owns the slot; a standby takes over within about 15 s")
	} else if owners == 0 {
		fmt.Fprintf(w, "\nThe owner is %s.\n", states[0].OwnerName)
	}
	if slices.ContainsFunc(states, func(s adminapi.LogState) bool { return s.Sync == "Unknown" }) {
		fmt.Fprintln(w, "\nIt is not known whether the servers sync each record (sync_interval: always): set --log-monitoring, in the chart log.jetStream.monitoringURL.")
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
