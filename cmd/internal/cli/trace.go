package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/internal/plural"
)

func newTrace(flags connectorFlags) *cobra.Command {
	var r connector
	var userID, since string
	var objects *command.Objects
	var all bool
	cmd := &cobra.Command{
		Use:   "trace MESSAGE_ID | --user-id ID",
		Short: "Show where a message is: accepted, filtered, pending, delivered or dead",
		Long: `Shows when a message was accepted, from which Source, and its state at each
destination: filtered, waiting, in retry, delivered, or a dead letter. MESSAGE_ID is
the messageId or, if no message has it, the Idempotency-Key that a receiver got.

Messages of the duplicate window (10 minutes by default) are found by an index, and
dead letters at any age. Older messages are kept while a destination still has to
deliver them: --since searches these from a time on, within a bound, and reports
when the bound ended the search. The last attempts at each endpoint are in the memory
of the dispatchers, after a restart only the last failed one; older ones are not
shown.

With --user-id it shows the messages with this userId that a destination still has to
deliver, and the dead letters: up to 100 of each per dispatcher, oldest first. It reads
all stored messages within a bound, or with --since those accepted since then, and
reports when the bound ended the search. Delivered messages are not found by userId.

Exits 1 if no message is found.`,
		Example: "  posthorn trace 0193e1c6-0b1c-7d2e-8f3a-5b6c7d8e9f00\n  posthorn trace order-17 --since 6h\n  posthorn trace order-17 -o yaml\n  posthorn trace --user-id u-42",
		Args: func(cmd *cobra.Command, args []string) error {
			if !cmd.Flags().Changed("user-id") {
				return command.ExactArgs("MESSAGE_ID or --user-id")(cmd, args)
			}
			if userID == "" {
				return command.Usagef("--user-id is empty; set it to the userId of the calls")
			}
			if len(args) > 0 {
				return command.Usagef("set either MESSAGE_ID or --user-id")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			from, err := moment("--since", since)
			if err == nil {
				err = command.CheckAllNamespaces(cmd, all, "")
			}
			if err != nil {
				return err
			}
			namespace, err := r.namespace()
			if err != nil {
				return err
			}
			var elsewhere []string
			search := func(t target) (*adminapi.MessageTrace, error) {
				if userID != "" {
					return t.TraceUser(cmd.Context(), userID, from)
				}
				m, err := t.Trace(cmd.Context(), args[0], from)
				if id, ok := idOf(args[0]); ok && err == nil && !m.Found() {
					return t.Trace(cmd.Context(), id, from)
				}
				return m, err
			}
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			out, found, whole := cmd.OutOrStdout(), false, true
			var failed error
			for _, t := range targets {
				m, err := search(t)
				if err != nil {
					failed = errors.Join(failed, t.explain(err))
					continue
				}
				if m.Incomplete != "" {
					whole = false
					fmt.Fprintf(cmd.ErrOrStderr(), "%snot complete: %s\n", of(t), m.Incomplete)
				}
				if !all {
					elsewhere = append(elsewhere, only(m, namespace)...)
				}
				if !m.Found() {
					continue
				}
				if !objects.Chosen() {
					err = printTrace(out, t, m, time.Now())
				} else {
					err = objects.Print(out, podTrace{t.pod, m})
				}
				if err != nil {
					return err
				}
				found = true
			}
			if failed != nil {
				return failed
			}
			switch {
			case found:
				return nil
			case len(elsewhere) > 0:
				slices.Sort(elsewhere)
				return fmt.Errorf("no message in namespace %s; found in namespace %s: set -n, or -A", namespace, strings.Join(slices.Compact(elsewhere), ", "))
			case !whole:
				return errors.New("the message may exist, because not all messages were searched")
			case userID != "":
				return fmt.Errorf("no message of user %s: no destination still has to deliver one, and none is in a dead letter; delivered messages are found by their messageId only", quoted(userID))
			case since != "":
				return fmt.Errorf("no message %s: it was not accepted since then, or all destinations are done with it", quoted(args[0]))
			}
			return fmt.Errorf("no message %s: it was not accepted within the duplicate window, is in no dead letter, and had none of the last attempts; --since 6h searches older messages", quoted(args[0]))
		},
	}
	r = flags(cmd)
	command.AllNamespacesFlag(cmd, &all)
	cmd.Flags().StringVar(&userID, "user-id", "", "show the pending messages and the dead letters of this userId")
	cmd.Flags().StringVar(&since, "since", "", "also search messages that were accepted since then, a duration (6h) or a time (2026-01-02T03:04:05Z); with --user-id only these")
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// only removes what belongs to other namespaces, and returns their names.
func only(m *adminapi.MessageTrace, namespace string) (others []string) {
	other := func(name string) bool {
		of, _, _ := strings.Cut(name, "/")
		if of != namespace {
			others = append(others, of)
		}
		return of != namespace
	}
	m.Accepted = slices.DeleteFunc(m.Accepted, func(a adminapi.AcceptedMessage) bool { return other(a.Source) })
	m.Attempts = slices.DeleteFunc(m.Attempts, func(a adminapi.Attempt) bool { return other(a.Destination) })
	m.DeadLetters = slices.DeleteFunc(m.DeadLetters, func(d adminapi.DeadLetter) bool { return other(d.Destination) })
	return others
}

// idOf returns the messageId of an Idempotency-Key that differs from it.
func idOf(key string) (id string, ok bool) {
	id, err := url.PathUnescape(key)
	return id, err == nil && id != key && event.ID(id).Key() == key
}

// podTrace is a trace with its dispatcher.
type podTrace struct {
	Pod string `json:"pod,omitempty"`
	*adminapi.MessageTrace
}

// of is a prefix with the name of the pod, if there is one.
func of(t target) string {
	if t.pod == "" {
		return ""
	}
	return "pod " + t.pod + ": "
}

// printTrace prints what a dispatcher knows about a message.
func printTrace(out io.Writer, from target, t *adminapi.MessageTrace, now time.Time) error {
	prefix, program := of(from), "posthorn"
	if from.pod != "" {
		program = "kubectl posthorn"
	}
	for _, m := range t.Accepted {
		what, id := "", cmp.Or(m.MessageID, t.MessageID)
		if m.Stored {
			what = m.Type
			if m.Event != "" {
				what += fmt.Sprintf(" %q", m.Event)
			}
			what += ", "
		}
		fmt.Fprintf(out, "%s%s: %saccepted by Source %s %s ago, at %s\n", prefix, quoted(string(id)), what, m.Source,
			now.Sub(m.AcceptedAt).Round(time.Second), m.AcceptedAt.UTC().Format(time.RFC3339))
		if !m.Stored {
			fmt.Fprintln(out, "All destinations are done with it: each has delivered it, filtered it, discarded it, or made it a dead letter.")
		} else if len(m.Destinations) == 0 {
			fmt.Fprintln(out, "No destination gets it: none has its Source.")
		}
		if err := printStates(out, m, t, now); err != nil {
			return err
		}
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
		fmt.Fprintf(out, "\nDead letter of %s%s since %s: %s after %s. %s\nTo do: %s deadletters show %s %s -n %s\n", d.Destination, letterID(t, &d), d.FailedAt.UTC().Format(time.RFC3339), strings.TrimSuffix(d.Reason+" "+status(d.StatusCode), " -"), plural.Count(d.Attempts, "attempt"), d.Message, program, name, d.Key, namespace)
	}
	return nil
}

// letterID names the message of a dead letter, unless the search has named it.
func letterID(t *adminapi.MessageTrace, d *adminapi.DeadLetter) string {
	if t.UserID == "" {
		return ""
	}
	return " with message " + quoted(string(d.MessageID))
}

// printStates prints a table with the state of a message at each destination.
func printStates(out io.Writer, m adminapi.AcceptedMessage, t *adminapi.MessageTrace, now time.Time) error {
	if len(m.Destinations) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "DESTINATION\tENDPOINT\tSTATE\tDETAIL")
	for _, d := range m.Destinations {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", d.Destination, cmp.Or(d.Endpoint, "-"), d.State, stateDetail(d, m.MessageID, t, now))
	}
	return w.Flush()
}

// stateDetail explains the state of a message at a destination.
func stateDetail(d adminapi.MessageAtEndpoint, id event.ID, t *adminapi.MessageTrace, now time.Time) string {
	switch d.State {
	case adminapi.MessageRetrying:
		if wait := d.NextAttempt.Sub(now).Round(time.Second); wait > 0 {
			return fmt.Sprintf("%s, the next one in %s", plural.Count(d.FailedAttempts, "failed attempt"), wait)
		}
		return plural.Count(d.FailedAttempts, "failed attempt") + ", the next one is due"
	case adminapi.MessageWaiting:
		return "waits for its first attempt; 'posthorn why' shows what is in front of it"
	case adminapi.MessageInFlight:
		return "an attempt is running"
	case adminapi.MessageFiltered:
		return "excluded by the destination's filter"
	case adminapi.MessageDelivered:
		for i := len(t.Attempts) - 1; i >= 0; i-- {
			if a := t.Attempts[i]; a.Reason == "" && (id == "" || a.MessageID == id) && a.Destination == d.Destination && (d.Endpoint == "" || d.Endpoint == a.Endpoint) {
				return fmt.Sprintf("answered %d, %s ago", a.StatusCode, now.Sub(a.Time).Round(time.Second))
			}
		}
	case adminapi.MessageDead:
		return "see below"
	case adminapi.MessageEnded:
		return "delivered or discarded; its attempts are no longer in memory: look for its Idempotency-Key in the receiver's log"
	}
	return ""
}
