package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

func newTrace(flags connectorFlags) *cobra.Command {
	var r connector
	var output string
	var since time.Duration
	cmd := &cobra.Command{
		Use:   "trace MESSAGE_ID",
		Short: "Show where a message is: accepted, filtered, pending, delivered or dead",
		Long: `Shows when a message was accepted, from which Source, and its state at each
destination: filtered, waiting, in retry, delivered, or a dead letter.

Messages of the duplicate window (10 minutes by default) are found by an index, and
dead letters at any age. Older messages are kept while a destination still has to
deliver them: --since searches these from a time on, within a bound, and reports
when the bound ended the search. The last attempts at each endpoint are in the memory
of the dispatchers; older ones are not shown.

Exits 1 if the message is not found.`,
		Example: "  posthorn trace 0193e1c6-0b1c-7d2e-8f3a-5b6c7d8e9f00\n  posthorn trace order-17 --since 6h\n  posthorn trace order-17 -o json",
		Args:    command.ExactArgs("MESSAGE_ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if since < 0 {
				return command.Usagef("--since %s: use the age of the oldest message, for example 6h", since)
			}
			var from time.Time
			if since > 0 {
				from = time.Now().Add(-since)
			}
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			out, found := cmd.OutOrStdout(), false
			var failed error
			for _, t := range targets {
				m, err := t.Trace(cmd.Context(), args[0], from)
				if err != nil {
					failed = errors.Join(failed, t.explain(err))
					continue
				}
				if m.Incomplete != "" {
					fmt.Fprintf(cmd.ErrOrStderr(), "%snot complete: %s\n", of(t), m.Incomplete)
				}
				if !m.Found() {
					continue
				}
				found = true
				if output == "json" {
					err = json.NewEncoder(out).Encode(struct {
						Pod string `json:"pod,omitempty"`
						*adminapi.MessageTrace
					}{t.pod, m})
				} else {
					err = printTrace(out, of(t), m, time.Now())
				}
				if err != nil {
					return err
				}
			}
			if failed != nil {
				return failed
			}
			if !found {
				hint := "it was not accepted within the duplicate window, is in no dead letter, and had none of the last attempts; --since 6h searches older messages"
				if since > 0 {
					hint = "it was not accepted since then, or all destinations are done with it"
				}
				return fmt.Errorf("no message %s: %s", quoted(args[0]), hint)
			}
			return nil
		},
	}
	r = flags(cmd)
	cmd.Flags().DurationVar(&since, "since", 0, "also search messages that were accepted since then, for example 6h")
	command.OutputFlag(cmd, &output, "", "json: one object per dispatcher", "json")
	return cmd
}

// of is a prefix with the name of the pod, if there is one.
func of(t target) string {
	if t.pod == "" {
		return ""
	}
	return "pod " + t.pod + ": "
}

// printTrace prints what a dispatcher knows about a message.
func printTrace(out io.Writer, prefix string, t *adminapi.MessageTrace, now time.Time) error {
	for _, m := range t.Accepted {
		what := ""
		if m.Stored {
			what = m.Type
			if m.Event != "" {
				what += fmt.Sprintf(" %q", m.Event)
			}
			what += ", "
		}
		fmt.Fprintf(out, "%s%s: %saccepted by Source %s %s ago, at %s\n", prefix, quoted(t.MessageID), what, m.Source, now.Sub(m.AcceptedAt).Round(time.Second), m.AcceptedAt.UTC().Format(time.RFC3339))
		if !m.Stored {
			fmt.Fprintln(out, "All destinations are done with it: each has delivered it, filtered it, discarded it, or made it a dead letter.")
		} else if len(m.Destinations) == 0 {
			fmt.Fprintln(out, "No destination gets it: none has its Source.")
		}
	}
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	header := false
	row := func(destination, endpoint, state, detail string) {
		if !header {
			fmt.Fprintln(w, "DESTINATION\tENDPOINT\tSTATE\tDETAIL")
			header = true
		}
		if endpoint == "" {
			endpoint = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", destination, endpoint, state, detail)
	}
	for _, m := range t.Accepted {
		for _, d := range m.Destinations {
			row(d.Destination, d.Endpoint, string(d.State), stateDetail(d, t, now))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(t.Attempts) > 0 {
		fmt.Fprintln(out, "\nAttempts:")
		w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
		fmt.Fprintln(w, attemptHeader)
		for _, a := range t.Attempts {
			fmt.Fprintln(w, attemptLine(a))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	for _, d := range t.DeadLetters {
		_, name, _ := strings.Cut(d.Destination, "/")
		namespace := strings.TrimSuffix(d.Destination, "/"+name)
		fmt.Fprintf(out, "\nDead letter of %s since %s: %s after %s. %s\nTo do: posthorn deadletters show %s %s -n %s\n", d.Destination, d.FailedAt.UTC().Format(time.RFC3339), strings.TrimSuffix(d.Reason+" "+status(d.StatusCode), " -"), plural(d.Attempts, "attempt"), d.Message, name, d.Key, namespace)
	}
	return nil
}

// stateDetail explains the state of a message at a destination.
func stateDetail(d adminapi.MessageAtEndpoint, t *adminapi.MessageTrace, now time.Time) string {
	switch d.State {
	case adminapi.MessageRetrying:
		if wait := d.NextAttempt.Sub(now).Round(time.Second); wait > 0 {
			return fmt.Sprintf("%s, the next one in %s", plural(d.FailedAttempts, "failed attempt"), wait)
		}
		return plural(d.FailedAttempts, "failed attempt") + ", the next one is due"
	case adminapi.MessageWaiting:
		return "waits for its first attempt; 'posthorn why' shows what is in front of it"
	case adminapi.MessageInFlight:
		return "an attempt is running"
	case adminapi.MessageFiltered:
		return "excluded by the destination's filter"
	case adminapi.MessageDelivered:
		for i := len(t.Attempts) - 1; i >= 0; i-- {
			if a := t.Attempts[i]; a.Reason == "" && a.Destination == d.Destination && (d.Endpoint == "" || d.Endpoint == a.Endpoint) {
				return fmt.Sprintf("answered %d, %s ago", a.StatusCode, now.Sub(a.Time).Round(time.Second))
			}
		}
	case adminapi.MessageDead:
		return "see below"
	case adminapi.MessageEnded:
		return "delivered or discarded; its attempts are no longer in memory"
	}
	return ""
}

// plural returns a number with its noun.
func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
