package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
)

func newDeadLetters() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "deadletters",
		Short: "List, show, redeliver or purge what could not be delivered",
		Long: `Dead letters are messages that a destination did not take within its retry window,
or refused for good. They are kept, with the reason, by spec.deadLetters.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDeadLettersList(), newDeadLettersShow(),
		newDeadLettersAction("redeliver", "Send dead letters once more", "redelivered"),
		newDeadLettersAction("purge", "Remove dead letters for good", "removed"))
	return cmd
}

// destinationFlags name a destination of a running dispatcher.
type destinationFlags struct{ admin, namespace string }

func (d *destinationFlags) register(cmd *cobra.Command) {
	adminFlag(cmd, &d.admin)
	cmd.Flags().StringVarP(&d.namespace, "namespace", "n", "default", "the destination's namespace")
}

// query names the destination to the admin API.
func (d *destinationFlags) query(name string) url.Values {
	return url.Values{"destination": {d.namespace + "/" + name}}
}

func newDeadLettersList() *cobra.Command {
	var d destinationFlags
	var output string
	var limit int
	cmd := &cobra.Command{
		Use:     "list DESTINATION",
		Short:   "List a destination's dead letters, oldest first",
		Example: "  posthorn deadletters list crm",
		Args:    exactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := d.query(args[0])
			query.Set("limit", fmt.Sprint(limit))
			body, err := ask(cmd, d.admin, "/deadletters?"+query.Encode(), "application/x-ndjson")
			if err != nil {
				return err
			}
			return table(cmd, output, body, "KEY\tFAILED\tTYPE\tEVENT\tMESSAGE ID\tATTEMPTS\tREASON\tSTATUS", func(l admin.DeadLetter) string {
				return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", l.Key, ago(l.FailedAt), l.Type, quoted(l.Event), quoted(l.MessageID), l.Attempts, l.Reason, status(l.StatusCode))
			})
		},
	}
	d.register(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "", "json: an object a line")
	cmd.Flags().IntVar(&limit, "limit", 100, "how many at most, up to 10,000")
	return cmd
}

func newDeadLettersShow() *cobra.Command {
	var d destinationFlags
	cmd := &cobra.Command{
		Use:     "show DESTINATION KEY",
		Short:   "Show one dead letter with its body and the last answer",
		Example: "  posthorn deadletters show crm 018c2f…",
		Args:    exactArgs("DESTINATION", "KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			body, err := ask(cmd, d.admin, "/deadletters/"+url.PathEscape(args[1])+"?"+d.query(args[0]).Encode(), "application/json")
			if err != nil {
				return err
			}
			var out bytes.Buffer
			if err := json.Indent(&out, body, "", "  "); err != nil {
				return err
			}
			fmt.Fprint(cmd.OutOrStdout(), out.String())
			return nil
		},
	}
	d.register(cmd)
	return cmd
}

func newDeadLettersAction(verb, short, done string) *cobra.Command {
	var d destinationFlags
	var a admin.Action
	var all bool
	var since, until string
	cmd := &cobra.Command{
		Use:   verb + " DESTINATION [KEY...]",
		Short: short,
		Long: short + `: those with the given keys, those that the flags choose, or --all.
With --dry-run they are only counted.`,
		Example: fmt.Sprintf("  posthorn deadletters %s crm --reason Rejected --since 2h --dry-run\n  posthorn deadletters %s crm --all", verb, verb),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("DESTINATION is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			a.Destination, a.Selector.Keys = d.namespace+"/"+args[0], args[1:]
			if a.Selector.Since, err = moment("--since", since); err != nil {
				return err
			}
			if a.Selector.Until, err = moment("--until", until); err != nil {
				return err
			}
			s := a.Selector
			chosen := len(s.Keys)+len(s.Reasons)+len(s.Types)+len(s.Events) > 0 || !s.Since.IsZero() || !s.Until.IsZero()
			if chosen == all {
				return usagef("choose dead letters by key or with --reason, --type, --event, --since, --until; or take --all")
			}
			return act(cmd, d.admin, verb, done, a)
		},
	}
	d.register(cmd)
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, "all dead letters of the destination")
	f.StringSliceVar(&a.Selector.Reasons, "reason", nil, "those with this reason, e.g. Expired")
	f.StringSliceVar(&a.Selector.Types, "type", nil, "those of this type of call")
	f.StringSliceVar(&a.Selector.Events, "event", nil, "those of this event")
	f.StringVar(&since, "since", "", "those that failed since then: a duration (2h) or a time (2026-01-02T03:04:05Z)")
	f.StringVar(&until, "until", "", "those that failed before then")
	f.BoolVar(&a.DryRun, "dry-run", false, "only count")
	if verb == "redeliver" {
		f.Float64Var(&a.Rate, "rate", redelivery.DefaultRate, "how many a second")
	}
	return cmd
}

// act has the dispatcher do something with dead letters and shows how far it is.
func act(cmd *cobra.Command, address, verb, done string, a admin.Action) error {
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(cmd.Context(), http.MethodPost, adminURL(address, "/deadletters/"+verb), bytes.NewReader(body))
	if err != nil {
		return usagef("--admin %q: %v", address, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("%w\nIs Posthorn running there? Set --admin", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return answerError(resp.Status, text)
	}
	f, live := cmd.ErrOrStderr().(*os.File)
	live = live && isTerminal(f)
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		var p admin.ActionProgress
		if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
			return err
		}
		if live {
			fmt.Fprintf(f, "\r%d matched, %d %s", p.Matched, p.Redelivered, done)
		}
		if p.Error != "" || p.Done {
			if live {
				fmt.Fprint(f, "\r\x1b[K")
			}
			what := fmt.Sprintf("%d %s", p.Redelivered, done)
			if a.DryRun {
				what = fmt.Sprintf("%d would be %s", p.Matched, done)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s (%d bytes)\n", what, p.Bytes)
			if p.Error != "" {
				return errors.New(p.Error)
			}
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("the dispatcher ended before it was done; what was not reached is still a dead letter")
}

func newAttempts() *cobra.Command {
	var d destinationFlags
	var endpoint, output string
	cmd := &cobra.Command{
		Use:     "attempts DESTINATION",
		Short:   "Show the last attempts at a destination",
		Example: "  posthorn attempts crm\n  posthorn attempts crm --endpoint primary -o json",
		Args:    exactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := d.query(args[0])
			query.Set("endpoint", endpoint)
			body, err := ask(cmd, d.admin, "/attempts?"+query.Encode(), "application/x-ndjson")
			if err != nil {
				return err
			}
			return table(cmd, output, body, attemptHeader, attemptLine)
		},
	}
	d.register(cmd)
	cmd.Flags().StringVar(&endpoint, "endpoint", "", "only this endpoint")
	cmd.Flags().StringVarP(&output, "output", "o", "", "json: an object a line")
	return cmd
}

func newTail() *cobra.Command {
	var address, namespace, endpoint, output string
	cmd := &cobra.Command{
		Use:     "tail [DESTINATION]",
		Short:   "Follow attempts as they end",
		Example: "  posthorn tail\n  posthorn tail crm -o json",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := url.Values{"endpoint": {endpoint}}
			if len(args) == 1 {
				query.Set("destination", namespace+"/"+args[0])
			}
			req, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, adminURL(address, "/tail?"+query.Encode()), nil)
			if err != nil {
				return usagef("--admin %q: %v", address, err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return fmt.Errorf("%w\nIs Posthorn running there? Set --admin", err)
			}
			defer resp.Body.Close()
			lines := bufio.NewScanner(resp.Body)
			for lines.Scan() {
				if output == "json" {
					fmt.Fprintf(cmd.OutOrStdout(), "%s\n", lines.Bytes())
					continue
				}
				var a delivery.Attempt
				if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), strings.ReplaceAll(attemptLine(a), "\t", "  "))
			}
			if cmd.Context().Err() != nil {
				return nil // Ctrl-C is how a tail ends.
			}
			return lines.Err()
		},
	}
	adminFlag(cmd, &address)
	f := cmd.Flags()
	f.StringVarP(&namespace, "namespace", "n", "default", "the destination's namespace")
	f.StringVar(&endpoint, "endpoint", "", "only this endpoint")
	f.StringVarP(&output, "output", "o", "", "json: an object a line")
	return cmd
}

const attemptHeader = "TIME\tDESTINATION\tENDPOINT\tMESSAGE ID\tATTEMPT\tRESULT\tTOOK\tCONNECT\tTLS\tFIRST BYTE\tADDRESS\tMESSAGE"

func attemptLine(a delivery.Attempt) string {
	result := status(a.StatusCode)
	if a.Reason != "" {
		result = strings.TrimSuffix(string(a.Reason)+" "+result, " -")
	}
	if a.Probe {
		result += " (probe)"
	}
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s", a.Time.Local().Format("15:04:05.000"), a.Destination, a.Endpoint, quoted(a.MessageID), a.Number,
		result, short(a.Duration), short(a.Timing.Connect), short(a.Timing.TLS), short(a.Timing.FirstByte), a.RemoteAddr, a.Message)
}

// table prints lines of JSON as a table, or as they are.
func table[T any](cmd *cobra.Command, output string, body []byte, header string, line func(T) string) error {
	switch output {
	case "json":
		_, err := cmd.OutOrStdout().Write(body)
		return err
	case "":
	default:
		return usagef("-o %q: use json", output)
	}
	if len(bytes.TrimSpace(body)) == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "None found.")
		return nil
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, header)
	for text := range bytes.Lines(body) {
		var item T
		if err := json.Unmarshal(text, &item); err != nil {
			return err
		}
		fmt.Fprintln(w, line(item))
	}
	return w.Flush()
}

// moment reads a point in time: a duration ago, or a time.
func moment(flag, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return time.Now().Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, usagef("%s %q: use a duration like 2h or a time like 2026-01-02T03:04:05Z", flag, text)
	}
	return t, nil
}

// quoted shows a text that comes from outside on one line, without control characters.
func quoted(s string) string {
	if s == "" {
		return "-"
	}
	q := fmt.Sprintf("%q", s)
	if q == `"`+s+`"` {
		return s
	}
	return q
}

func status(code int) string {
	if code == 0 {
		return "-"
	}
	return fmt.Sprint(code)
}

func ago(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }

func short(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return d.Round(10 * time.Microsecond).String()
}
