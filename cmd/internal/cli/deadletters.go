package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/internal/plural"
	"github.com/posthorn/posthorn/internal/termsafe"
)

func newDeadLetters(flags connectorFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "deadletters",
		Short: "List, show, redeliver or purge undelivered messages",
		Long: `Dead letters are messages that a destination did not accept within its retry window,
or rejected for good. spec.deadLetters sets how long they are kept.`,
		Args: command.OnlyCommands,
		RunE: command.ShowHelp,
	}
	cmd.AddCommand(newDeadLettersList(flags), newDeadLettersShow(flags),
		newDeadLettersAction(flags, "redeliver", "Send dead letters again", "redelivered", (*adminapi.Client).Redeliver),
		newDeadLettersAction(flags, "purge", "Remove dead letters permanently", "removed", (*adminapi.Client).Purge))
	return cmd
}

// destination returns the name in the admin API of a destination that is given as NAME or KIND/NAME.
func destination(r connector, arg string) (string, error) {
	name, err := destinationArg(arg)
	if err != nil {
		return "", err
	}
	ns, err := r.namespace()
	return ns + "/" + name, err
}

// unknown fails with a similar name if no dispatcher has a destination ("namespace/name"). It is nil
// for "", and if a dispatcher does not answer.
func unknown(ctx context.Context, targets []target, destination string) error {
	return unknownEndpoint(ctx, targets, destination, "")
}

// unknownEndpoint also fails, with the known endpoints, if the destination has no such endpoint. Without
// a destination, all have to be without it.
func unknownEndpoint(ctx context.Context, targets []target, destination, endpoint string) error {
	namespace, name, _ := strings.Cut(destination, "/")
	if destination == "" && endpoint == "" {
		return nil
	}
	var names, endpoints []string
	found := destination == ""
	for _, t := range targets {
		report, err := t.Report(ctx, "")
		if err != nil {
			return nil
		}
		for _, n := range report.Namespaces {
			for _, d := range n.Destinations {
				if destination != "" && n.Namespace != namespace {
					continue
				}
				if destination != "" && d.Name != name {
					if !slices.Contains(names, d.Name) {
						names = append(names, d.Name)
					}
					continue
				}
				found = true
				if endpoint == "" {
					return nil
				}
				for _, e := range d.Endpoints {
					endpoints = append(endpoints, e.Name)
				}
			}
		}
	}
	if slices.Contains(endpoints, endpoint) {
		return nil
	}
	if found {
		slices.Sort(endpoints)
		return fmt.Errorf("no endpoint %q of %s; use one of %s", endpoint, cmp.Or(destination, "any destination"),
			shortList(slices.Compact(endpoints)))
	}
	return fmt.Errorf("no dispatcher has a destination %q in namespace %q%s", name, namespace, command.DidYouMean(name, names))
}

// shortList joins names, at most ten of them.
func shortList(names []string) string {
	const most = 10
	if len(names) > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(", … (%d)", len(names))
	}
	return cmp.Or(strings.Join(names, ", "), "none: there are no endpoints")
}

// maxListed is the highest limit of a list of dead letters.
const maxListed = 10_000

func newDeadLettersList(flags connectorFlags) *cobra.Command {
	var r connector
	var objects *command.Objects
	var limit int
	cmd := &cobra.Command{
		Use:     "list DESTINATION",
		Short:   "List a destination's dead letters, oldest first",
		Example: "  posthorn deadletters list crm",
		Args:    command.ExactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := destination(r, args[0])
			if err != nil {
				return err
			}
			if limit < 1 || limit > maxListed {
				return command.Usagef("--limit %d: use 1 to %d", limit, maxListed)
			}
			request := func(t target) iter.Seq2[adminapi.DeadLetter, error] { return t.DeadLetters(cmd.Context(), name, limit) }
			footer := func(targets []target, shown int) string { return omitted(cmd.Context(), targets, name, shown, limit) }
			return list(cmd, r, name, "", objects, "No dead letters of "+name+".", nil, footer, "KEY\tFAILED\tTYPE\tEVENT\tMESSAGE ID\tATTEMPTS\tREASON\tSTATUS", request, func(l adminapi.DeadLetter) string {
				return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", l.Key, ago(l.FailedAt), l.Type, quoted(l.Event), quoted(string(l.MessageID)),
					l.Attempts, l.Reason, status(l.StatusCode))
			})
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	objects = command.ObjectsFlag(cmd)
	cmd.Flags().IntVar(&limit, "limit", 100, "maximum number per dispatcher, up to 10,000")
	return cmd
}

// omitted returns the note below a list of dead letters that the limit has cut off; "" if it is
// complete.
func omitted(ctx context.Context, targets []target, destination string, shown, limit int) string {
	if shown < limit {
		return ""
	}
	var stored int64
	for _, t := range targets {
		n, err := t.DeadLettersStored(ctx, destination)
		if err != nil { // An older dispatcher, or one that did not answer, which the list has reported.
			return fmt.Sprintf("%d shown; there may be more, set --limit", shown)
		}
		stored += n
	}
	if int64(shown) >= stored {
		return ""
	}
	return fmt.Sprintf("%d of %d shown; set --limit to see more", shown, stored)
}

func newDeadLettersShow(flags connectorFlags) *cobra.Command {
	var r connector
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "show DESTINATION KEY|MESSAGE_ID",
		Short: "Show one dead letter with its body and the receiver's last response",
		Long: `Shows one dead letter with its body and the receiver's last response. The first
characters of the key or of the messageId, at least six, are enough if no other dead
letter has them. In a cluster the body needs the Role posthorn-bodies-user; without
it the rest is shown.`,
		Example: "  posthorn deadletters show crm 018c2f…",
		Args:    command.ExactArgs("DESTINATION", "KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := destination(r, args[0])
			if err != nil {
				return err
			}
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			letter, withoutBody, err := findDeadLetter(cmd.Context(), targets, name, args[1])
			if err != nil {
				return err
			}
			if withoutBody != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "The body is not shown. %v\n", withoutBody)
			}
			if objects.Chosen() {
				return objects.Print(cmd.OutOrStdout(), letter)
			}
			text, err := json.MarshalIndent(letter, "", "  ")
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s\n", termsafe.Escape(text))
			return nil
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// findDeadLetter returns a dead letter, which only one of the dispatchers has; withoutBody is the
// error if the user may not read its body. It returns the error of a dispatcher that did not answer
// rather than the others' 404.
func findDeadLetter(ctx context.Context, targets []target, destination, key string) (d adminapi.DeadLetter, withoutBody, err error) {
	for _, t := range targets {
		found, failed := t.DeadLetterWithBody(ctx, destination, key)
		if forbidden(failed) {
			withoutBody = t.explain(failed)
			found, failed = t.DeadLetter(ctx, destination, key)
		}
		if failed == nil {
			return found, withoutBody, nil
		}
		if status, ok := errors.AsType[*adminapi.StatusError](failed); !ok || status.StatusCode != http.StatusNotFound {
			err = t.explain(failed)
		} else if err == nil {
			err = failed
		}
	}
	return d, nil, err
}

// forbidden reports whether the user lacks a permission.
func forbidden(err error) bool {
	status, ok := errors.AsType[*adminapi.StatusError](err)
	return ok && status.StatusCode == http.StatusForbidden
}

// action requests an action on the dead letters of one dispatcher: a method of adminapi.Client.
type action = func(*adminapi.Client, context.Context, adminapi.DeadLetterAction,
	func(adminapi.DeadLetterProgress)) (adminapi.DeadLetterProgress, error)

func newDeadLettersAction(flags connectorFlags, verb, short, done string, request action) *cobra.Command {
	var r connector
	var a adminapi.DeadLetterAction
	var chosen selection
	var yes bool
	var objects *command.Objects
	purge := verb == "purge"
	example := fmt.Sprintf("  posthorn deadletters %s crm --reason Rejected --since 2h --dry-run\n  posthorn deadletters %s crm --reason Rejected --status-code 422\n  posthorn deadletters %s crm --all", verb, verb, verb)
	long := short + `. Select them by key, by a filter flag, or with --all.
With --dry-run they are only counted.`
	if !purge {
		long += ` In a cluster, 'redeliver' is the
command for the owners of a namespace: it creates a Redelivery, which continues
after a restart. This one is for administrators, and ends with the command.

Redelivered means pending again. The other destinations of the Source do not get
these messages, but count them as pending until their lanes have read them.`
	} else {
		example += " --yes"
		long += ` On a terminal the command shows their number and
asks for confirmation; otherwise it requires --yes.`
	}
	cmd := &cobra.Command{
		Use:     verb + " DESTINATION [KEY...]",
		Short:   short,
		Long:    long,
		Example: example,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return command.Usagef("DESTINATION is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := destination(r, args[0])
			if err != nil {
				return err
			}
			if err := chosen.parse("by key or with", args[1:]...); err != nil {
				return err
			}
			a.Destination, a.Selector = name, chosen.DeadLetterSelector
			return act(cmd, r, objects, request, done, a, purge && !yes && !a.DryRun)
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	chosen.register(cmd)
	cmd.Flags().BoolVar(&a.DryRun, "dry-run", false, "only count")
	objects = command.ObjectsFlag(cmd)
	if purge {
		command.YesFlag(cmd, &yes)
	} else {
		cmd.Flags().Float64Var(&a.Rate, "rate", adminapi.DefaultRate, "dead letters per second")
	}
	return cmd
}

// selection holds the flags that select dead letters.
type selection struct {
	adminapi.DeadLetterSelector
	all, noResponse bool
	since, until    string
}

func (c *selection) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&c.all, "all", false, "all dead letters of the destination")
	f.StringSliceVar(&c.Reasons, "reason", nil, "those with this reason, e.g. Expired")
	f.IntSliceVar(&c.StatusCodes, "status-code", nil, "those whose last response had this status code, e.g. 422")
	f.BoolVar(&c.noResponse, "no-response", false, "those without a response, in addition to --status-code")
	f.StringSliceVar(&c.Types, "type", nil, "those with this type of call")
	f.StringSliceVar(&c.Events, "event", nil, "those whose event name matches, e.g. \"Order *\"")
	f.StringVar(&c.since, "since", "", "those that failed since then: a duration (2h) or a time (2026-01-02T03:04:05Z)")
	f.StringVar(&c.until, "until", "", "those that failed before then")
	c.completeValues(cmd)
}

// completeValues completes --reason and --type.
func (c *selection) completeValues(cmd *cobra.Command) {
	for flag, values := range map[string][]string{"reason": v1beta1.DeadLetterReasons, "type": callTypes} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// callTypes are the types of the calls that a dead letter can have.
var callTypes = []string{"identify", "track", "page", "screen", "group", "alias", "delete"}

// checkValues fails for a value that no dead letter can have, because it would select nothing.
func checkValues(flag string, values, known []string) error {
	for _, v := range values {
		if slices.Contains(known, v) {
			continue
		}
		i := slices.IndexFunc(known, func(k string) bool { return strings.EqualFold(k, v) })
		suggestion := command.DidYouMean(v, known)
		if i >= 0 {
			suggestion = fmt.Sprintf("; did you mean %s?", known[i])
		}
		return command.Usagef("%s %q is not one of %s%s", flag, v, strings.Join(known, ", "), suggestion)
	}
	return nil
}

// parse makes the selector. At least one selection, or --all, is required; how names the
// alternatives in the error.
func (c *selection) parse(how string, keys ...string) (err error) {
	if err := cmp.Or(checkValues("--reason", c.Reasons, v1beta1.DeadLetterReasons), checkValues("--type", c.Types, callTypes)); err != nil {
		return err
	}
	for _, code := range c.StatusCodes {
		if code < 100 || code > 999 {
			return command.Usagef("--status-code %d: use a status code like 422; --no-response selects dead letters without one", code)
		}
	}
	if c.noResponse {
		c.StatusCodes = append(c.StatusCodes, 0)
	}
	if c.Since, err = moment("--since", c.since); err != nil {
		return err
	}
	if c.Until, err = moment("--until", c.until); err != nil {
		return err
	}
	c.Keys = keys
	if some := len(keys)+len(c.Reasons)+len(c.StatusCodes)+len(c.Types)+len(c.Events) > 0 || !c.Since.IsZero() ||
		!c.Until.IsZero(); some == c.all {
		return command.Usagef("select dead letters %s --reason, --status-code, --no-response, --type, --event, --since or --until; or set --all", how)
	}
	return nil
}

// act sends an action to every dispatcher and shows the progress. If ask is true, the user confirms
// the number of selected dead letters before.
func act(cmd *cobra.Command, r connector, objects *command.Objects, request action, done string, a adminapi.DeadLetterAction,
	ask bool) error {
	targets, closeAll, err := r.connect(cmd.Context())
	if err != nil {
		return err
	}
	defer closeAll()
	until := make([]time.Time, len(targets))
	if ask {
		count, n := a, int64(0)
		count.DryRun = true
		for i, t := range targets {
			p, err := request(t.Client, cmd.Context(), count, nil)
			if err != nil {
				return t.explain(err)
			}
			n += p.Matched
			until[i] = p.AsOf // Dead letters that are stored during the question are not confirmed.
		}
		question := fmt.Sprintf("Remove %s of %s permanently?", plural.Count(n, "dead letter"), a.Destination)
		if n == 0 {
			a.DryRun = true // A dead letter that is stored from now on is not confirmed.
		} else {
			if err := command.Confirm(cmd, question, fmt.Sprintf("set --yes to remove %s of %s permanently", plural.Count(n, "dead letter"),
				a.Destination)); err != nil {
				return err
			}
		}
	}
	var progress atomic.Pointer[adminapi.DeadLetterProgress]
	progress.Store(&adminapi.DeadLetterProgress{})
	hide := showProgress(cmd.ErrOrStderr(), func() string {
		p := progress.Load()
		return fmt.Sprintf("%d matched, %d %s", p.Matched, p.Redelivered, done)
	})
	var sum adminapi.DeadLetterProgress
	plus := func(p adminapi.DeadLetterProgress) adminapi.DeadLetterProgress {
		return adminapi.DeadLetterProgress{Matched: sum.Matched + p.Matched, Redelivered: sum.Redelivered + p.Redelivered,
			Bytes: sum.Bytes + p.Bytes}
	}
	chosen := a.Selector.Until
	for i, t := range targets {
		a.Selector.Until = chosen
		if at := until[i]; !at.IsZero() && (chosen.IsZero() || at.Before(chosen)) {
			a.Selector.Until = at
		}
		var last adminapi.DeadLetterProgress
		last, err = request(t.Client, cmd.Context(), a, func(p adminapi.DeadLetterProgress) {
			now := plus(p)
			progress.Store(&now)
		})
		sum = plus(last)
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the dispatcher stopped before it was done; the remaining messages are still dead letters")
		}
		if err != nil {
			err = t.explain(err)
			break
		}
	}
	hide()
	if err == nil && sum.Matched == 0 {
		if err := unknown(cmd.Context(), targets, a.Destination); err != nil {
			return err
		}
	}
	what := fmt.Sprintf("%d %s", sum.Redelivered, done)
	if a.DryRun && !ask {
		what = fmt.Sprintf("%d would be %s", sum.Matched, done)
	}
	if objects.Chosen() {
		sum.Done = err == nil
		err = errors.Join(err, objects.Print(cmd.OutOrStdout(), sum))
	} else {
		fmt.Fprintf(cmd.OutOrStdout(), "%s (%d bytes)\n", what, sum.Bytes)
	}
	if left := sum.Matched - sum.Redelivered; err == nil && !a.DryRun && left > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d kept: their Source or endpoint is no longer part of the destination\n", left)
	}
	if keys := int64(len(a.Selector.Keys)); err == nil && sum.Matched < keys {
		return fmt.Errorf("%d of %s: no such dead letter of %s, or another flag excludes it; 'deadletters list' shows the keys", keys-sum.Matched, plural.Count(keys, "key"), a.Destination)
	}
	return err
}

func newAttempts(flags connectorFlags) *cobra.Command {
	var r connector
	var endpoint string
	var objects *command.Objects
	var limit int
	var failed bool
	cmd := &cobra.Command{
		Use:     "attempts DESTINATION",
		Short:   "Show the last delivery attempts to a destination",
		Example: "  posthorn attempts crm\n  posthorn attempts crm --failed --limit 10\n  posthorn attempts crm --endpoint primary -o json",
		Args:    command.ExactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := destination(r, args[0])
			if err != nil {
				return err
			}
			if limit < 0 {
				return command.Usagef("--limit %d: use 1 or more, or 0 for all", limit)
			}
			request := func(t target) iter.Seq2[adminapi.Attempt, error] { return t.Attempts(cmd.Context(), name, endpoint) }
			var footer string
			pick := func(all []adminapi.Attempt) (picked []adminapi.Attempt) {
				picked, footer = pickAttempts(all, failed, limit)
				return picked
			}
			none := "No attempts to " + name + " since the dispatchers started."
			if failed {
				none = "No failed attempts among the last ones to " + name + "."
			}
			if endpoint != "" {
				none = strings.TrimSuffix(none, ".") + fmt.Sprintf(", at endpoint %q.", endpoint)
			}
			return list(cmd, r, name, endpoint, objects, none, pick, func([]target, int) string {
				if objects.Chosen() {
					return ""
				}
				return footer
			}, attemptHeader, request, attemptLine)
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	f := cmd.Flags()
	f.StringVar(&endpoint, "endpoint", "", "only this endpoint")
	f.IntVar(&limit, "limit", 0, "only the newest ones, this many (0: all)")
	f.BoolVar(&failed, "failed", false, "only failed attempts")
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// pickAttempts returns the newest attempts of all dispatchers, oldest first, and their number as text.
func pickAttempts(all []adminapi.Attempt, failedOnly bool, limit int) ([]adminapi.Attempt, string) {
	failures := 0
	for _, a := range all {
		if a.Reason != "" {
			failures++
		}
	}
	text := fmt.Sprintf("%s, %d failed", plural.Count(len(all), "attempt"), failures)
	if failedOnly {
		all = slices.DeleteFunc(all, func(a adminapi.Attempt) bool { return a.Reason == "" })
	}
	slices.SortStableFunc(all, func(a, b adminapi.Attempt) int { return a.Time.Compare(b.Time) })
	if limit > 0 && len(all) > limit {
		all = all[len(all)-limit:]
		text += fmt.Sprintf("; %d shown", limit)
	}
	return all, text
}

const attemptHeader = "TIME\tDESTINATION\tENDPOINT\tMESSAGE ID\tATTEMPT\tRESULT\tTOOK\tCONNECT\tTLS\tFIRST BYTE\tADDRESS\tMESSAGE"

func attemptLine(a adminapi.Attempt) string {
	result := status(a.StatusCode)
	if a.Reason != "" {
		result = strings.TrimSuffix(a.Reason+" "+result, " -")
	}
	if a.Probe {
		result += " (probe)"
	}
	if a.Test {
		result += " (test)"
	}
	if a.Messages > 0 {
		result += fmt.Sprintf(" (batch of %d)", a.Messages)
	}
	if a.RetryAfter > 0 {
		a.Message += fmt.Sprintf("; Retry-After: %d", int64(a.RetryAfter.Seconds()))
	}
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s", a.Time.Local().Format("15:04:05.000"), a.Destination, a.Endpoint,
		quoted(string(a.MessageID)), a.Number,
		result, short(a.Duration), short(a.Timing.Connect), short(a.Timing.TLS), short(a.Timing.FirstByte), a.RemoteAddr, a.Message)
}

// list prints the items that request returns of every dispatcher and pick, unless nil, chooses, as a
// table or as lines of JSON, and then the text of footer to stderr; footer may be nil. If some dispatchers fail, it still prints the
// items of the others. Without any item it fails if there is no such destination, or no such endpoint of it ("" for all).
func list[T any](cmd *cobra.Command, r connector, destination, endpoint string, objects *command.Objects, none string, pick func([]T) []T,
	footer func(targets []target, shown int) string, header string, request func(target) iter.Seq2[T, error], line func(T) string) error {
	targets, closeAll, err := r.connect(cmd.Context())
	if err != nil {
		return err
	}
	defer closeAll()
	var items []T
	for _, t := range targets {
		for item, failed := range request(t) {
			if failed != nil {
				err = errors.Join(err, t.explain(failed))
				break
			}
			items = append(items, item)
		}
	}
	if len(items) == 0 && err == nil {
		if err := unknownEndpoint(cmd.Context(), targets, destination, endpoint); err != nil {
			return err
		}
	}
	if pick != nil && len(items) > 0 {
		items = pick(items)
	}
	if footer != nil {
		defer func() {
			if text := footer(targets, len(items)); text != "" {
				fmt.Fprintln(cmd.ErrOrStderr(), text)
			}
		}()
	}
	if objects.Chosen() {
		return errors.Join(err, command.PrintAll(cmd.OutOrStdout(), objects, items))
	}
	if len(items) == 0 {
		if err == nil {
			fmt.Fprintln(cmd.ErrOrStderr(), none)
		}
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, header)
	for _, item := range items {
		fmt.Fprintln(w, line(item))
	}
	return errors.Join(w.Flush(), err)
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
