package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

func newDeadLetters(way reaching) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "deadletters",
		Short: "List, show, redeliver or purge undelivered messages",
		Long: `Dead letters are messages that a destination did not accept within its retry window,
or rejected for good. spec.deadLetters sets how long they are kept.`,
		Args: onlyCommands,
		RunE: showHelp,
	}
	cmd.AddCommand(newDeadLettersList(way), newDeadLettersShow(way),
		newDeadLettersAction(way, "redeliver", "Send dead letters again", "redelivered"),
		newDeadLettersAction(way, "purge", "Remove dead letters permanently", "removed"))
	return cmd
}

// destination returns the admin API's query for a destination.
func destination(r reach, name string) (url.Values, error) {
	ns, err := r.namespace()
	return url.Values{"destination": {ns + "/" + name}}, err
}

func newDeadLettersList(way reaching) *cobra.Command {
	var r reach
	var output string
	var limit int
	cmd := &cobra.Command{
		Use:     "list DESTINATION",
		Short:   "List a destination's dead letters, oldest first",
		Example: "  posthorn deadletters list crm",
		Args:    exactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := destination(r, args[0])
			if err != nil {
				return err
			}
			query.Set("limit", fmt.Sprint(limit))
			return list(cmd, r, "/deadletters", query, output, "No dead letters of %s.", "KEY\tFAILED\tTYPE\tEVENT\tMESSAGE ID\tATTEMPTS\tREASON\tSTATUS", func(l adminapi.DeadLetter) string {
				return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", l.Key, ago(l.FailedAt), l.Type, quoted(l.Event), quoted(l.MessageID), l.Attempts, l.Reason, status(l.StatusCode))
			})
		},
	}
	r = way(cmd)
	outputFlag(cmd, &output, "", "json: one object per line", "json")
	cmd.Flags().IntVar(&limit, "limit", 100, "maximum number per dispatcher, up to 10,000")
	return cmd
}

func newDeadLettersShow(way reaching) *cobra.Command {
	var r reach
	cmd := &cobra.Command{
		Use:     "show DESTINATION KEY",
		Short:   "Show one dead letter with its body and the receiver's last response",
		Example: "  posthorn deadletters show crm 018c2f…",
		Args:    exactArgs("DESTINATION", "KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := destination(r, args[0])
			if err != nil {
				return err
			}
			targets, closeAll, err := r.open(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			var body []byte
			for _, t := range targets { // only one pod has it
				found, failed := t.get(cmd.Context(), "/deadletters/"+url.PathEscape(args[1])+"?"+query.Encode(), "application/json")
				if failed == nil {
					body, err = found, nil
					break
				}
				if a := (*answer)(nil); !errors.As(failed, &a) || a.code != http.StatusNotFound {
					err = named(t, failed)
				} else if err == nil {
					err = failed
				}
			}
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
	r = way(cmd)
	return cmd
}

func newDeadLettersAction(way reaching, verb, short, done string) *cobra.Command {
	var r reach
	var a adminapi.DeadLetterAction
	var chosen selection
	cmd := &cobra.Command{
		Use:   verb + " DESTINATION [KEY...]",
		Short: short,
		Long: short + `. Select them by key, by a filter flag, or with --all.
With --dry-run they are only counted.`,
		Example: fmt.Sprintf("  posthorn deadletters %s crm --reason Rejected --since 2h --dry-run\n  posthorn deadletters %s crm --all", verb, verb),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("DESTINATION is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := destination(r, args[0])
			if err != nil {
				return err
			}
			if err := chosen.parse("by key or with", args[1:]...); err != nil {
				return err
			}
			a.Destination, a.Selector = query.Get("destination"), chosen.DeadLetterSelector
			return act(cmd, r, verb, done, a)
		},
	}
	r = way(cmd)
	chosen.register(cmd)
	cmd.Flags().BoolVar(&a.DryRun, "dry-run", false, "only count")
	if verb == "redeliver" {
		cmd.Flags().Float64Var(&a.Rate, "rate", adminapi.DefaultRate, "dead letters per second")
	}
	return cmd
}

// selection holds the flags that select dead letters.
type selection struct {
	adminapi.DeadLetterSelector
	all          bool
	since, until string
}

func (c *selection) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&c.all, "all", false, "all dead letters of the destination")
	f.StringSliceVar(&c.Reasons, "reason", nil, "those with this reason, e.g. Expired")
	f.StringSliceVar(&c.Types, "type", nil, "those with this type of call")
	f.StringSliceVar(&c.Events, "event", nil, "those with this event name")
	f.StringVar(&c.since, "since", "", "those that failed since then: a duration (2h) or a time (2026-01-02T03:04:05Z)")
	f.StringVar(&c.until, "until", "", "those that failed before then")
}

// parse makes the selector. At least one selection, or --all, is required; how names the
// alternatives in the error.
func (c *selection) parse(how string, keys ...string) (err error) {
	if c.Since, err = moment("--since", c.since); err != nil {
		return err
	}
	if c.Until, err = moment("--until", c.until); err != nil {
		return err
	}
	c.Keys = keys
	if some := len(keys)+len(c.Reasons)+len(c.Types)+len(c.Events) > 0 || !c.Since.IsZero() || !c.Until.IsZero(); some == c.all {
		return usagef("select dead letters %s --reason, --type, --event, --since or --until; or set --all", how)
	}
	return nil
}

// act sends an action to every dispatcher and shows the progress.
func act(cmd *cobra.Command, r reach, verb, done string, a adminapi.DeadLetterAction) error {
	targets, closeAll, err := r.open(cmd.Context())
	if err != nil {
		return err
	}
	defer closeAll()
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	var progress atomic.Pointer[adminapi.DeadLetterProgress]
	progress.Store(&adminapi.DeadLetterProgress{})
	hide := showProgress(cmd.ErrOrStderr(), func() string {
		p := progress.Load()
		return fmt.Sprintf("%d matched, %d %s", p.Matched, p.Redelivered, done)
	})
	var sum adminapi.DeadLetterProgress
	plus := func(p adminapi.DeadLetterProgress) adminapi.DeadLetterProgress {
		return adminapi.DeadLetterProgress{Matched: sum.Matched + p.Matched, Redelivered: sum.Redelivered + p.Redelivered, Bytes: sum.Bytes + p.Bytes}
	}
	for _, t := range targets {
		var last adminapi.DeadLetterProgress
		last, err = actOn(cmd.Context(), t, verb, body, func(p adminapi.DeadLetterProgress) {
			now := plus(p)
			progress.Store(&now)
		})
		sum = plus(last)
		if err != nil {
			err = named(t, err)
			break
		}
	}
	hide()
	what := fmt.Sprintf("%d %s", sum.Redelivered, done)
	if a.DryRun {
		what = fmt.Sprintf("%d would be %s", sum.Matched, done)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s (%d bytes)\n", what, sum.Bytes)
	if left := sum.Matched - sum.Redelivered; err == nil && !a.DryRun && left > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d kept: their Source or endpoint is no longer part of the destination\n", left)
	}
	return err
}

// actOn sends the action to one dispatcher and returns its last progress.
func actOn(ctx context.Context, t target, verb string, body []byte, onProgress func(adminapi.DeadLetterProgress)) (p adminapi.DeadLetterProgress, err error) {
	resp, err := t.do(ctx, http.MethodPost, "/deadletters/"+verb, "application/x-ndjson", bytes.NewReader(body))
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	if p, err = adminapi.FollowDeadLetters(resp.Body, onProgress); errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the dispatcher stopped before it was done; the remaining messages are still dead letters")
	}
	return p, err
}

func newAttempts(way reaching) *cobra.Command {
	var r reach
	var endpoint, output string
	cmd := &cobra.Command{
		Use:     "attempts DESTINATION",
		Short:   "Show the last delivery attempts to a destination",
		Example: "  posthorn attempts crm\n  posthorn attempts crm --endpoint primary -o json",
		Args:    exactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := destination(r, args[0])
			if err != nil {
				return err
			}
			query.Set("endpoint", endpoint)
			return list(cmd, r, "/attempts", query, output, "No attempts to %s since the dispatchers started.", attemptHeader, attemptLine)
		},
	}
	r = way(cmd)
	cmd.Flags().StringVar(&endpoint, "endpoint", "", "only this endpoint")
	outputFlag(cmd, &output, "", "json: one object per line", "json")
	return cmd
}

func newTail(way reaching) *cobra.Command {
	var r reach
	var endpoint, output string
	cmd := &cobra.Command{
		Use:     "tail [DESTINATION]",
		Short:   "Follow delivery attempts",
		Example: "  posthorn tail\n  posthorn tail crm -o json",
		Args:    atMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := url.Values{}
			if len(args) == 1 {
				var err error
				if query, err = destination(r, args[0]); err != nil {
					return err
				}
			}
			query.Set("endpoint", endpoint)
			targets, closeAll, err := r.open(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			lines := make(chan []byte)
			group, ctx := errgroup.WithContext(cmd.Context())
			for _, t := range targets {
				group.Go(func() error { return follow(ctx, t, query, lines) })
			}
			go func() { _ = group.Wait(); close(lines) }()
			for line := range lines {
				if output == "json" {
					fmt.Fprintf(cmd.OutOrStdout(), "%s\n", line)
					continue
				}
				var a adminapi.Attempt
				if err := json.Unmarshal(line, &a); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), strings.ReplaceAll(attemptLine(a), "\t", "  "))
			}
			if cmd.Context().Err() != nil {
				return nil // Ctrl-C is the usual end.
			}
			return group.Wait()
		},
	}
	r = way(cmd)
	f := cmd.Flags()
	f.StringVar(&endpoint, "endpoint", "", "only this endpoint")
	outputFlag(cmd, &output, "", "json: one object per line", "json")
	return cmd
}

// follow forwards the attempts of one dispatcher as they end.
func follow(ctx context.Context, t target, query url.Values, lines chan<- []byte) error {
	resp, err := t.do(ctx, http.MethodGet, "/tail?"+query.Encode(), "application/x-ndjson", nil)
	if err != nil {
		return named(t, err)
	}
	defer resp.Body.Close()
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		select {
		case lines <- bytes.Clone(in.Bytes()):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	err = in.Err()
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the dispatcher stopped; run the command again to follow its successor")
	}
	return named(t, err)
}

const attemptHeader = "TIME\tDESTINATION\tENDPOINT\tMESSAGE ID\tATTEMPT\tRESULT\tTOOK\tCONNECT\tTLS\tFIRST BYTE\tADDRESS\tMESSAGE"

func attemptLine(a adminapi.Attempt) string {
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

// list prints the JSON lines of every dispatcher, as a table or unchanged. If some dispatchers
// fail, it still prints the answers of the others.
func list[T any](cmd *cobra.Command, r reach, path string, query url.Values, output, none, header string, line func(T) string) error {
	targets, closeAll, err := r.open(cmd.Context())
	if err != nil {
		return err
	}
	defer closeAll()
	var body []byte
	for _, t := range targets {
		lines, failed := t.get(cmd.Context(), path+"?"+query.Encode(), "application/x-ndjson")
		body, err = append(body, lines...), errors.Join(err, named(t, failed))
	}
	if output == "json" {
		_, _ = cmd.OutOrStdout().Write(body)
		return err
	}
	if len(body) == 0 {
		if err == nil {
			fmt.Fprintf(cmd.ErrOrStderr(), none+"\n", query.Get("destination"))
		}
		return err
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
	return errors.Join(w.Flush(), err)
}

// moment parses a point in time: a duration ago, or a time.
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

// quoted makes external text safe to print: one line, without control characters.
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
