package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

func newAudience(flags senderFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audience",
		Short: "Sync the members of an audience",
		Args:  command.OnlyCommands,
		RunE:  command.ShowHelp,
	}
	cmd.AddCommand(newAudienceSync(flags))
	return cmd
}

func newAudienceSync(flags senderFlags) *cobra.Command {
	var c sender
	var o syncOptions
	var objects *command.Objects
	var wait bool
	cmd := &cobra.Command{
		Use:   "sync KEY FILE|-",
		Short: "Upload an audience; changes are sent to the destinations",
		Long: `Uploads a file (or standard input) of members, one JSON object per line:

  {"userId": "u1"}                  of an Audience
  {"userId": "u1", "value": 12.5}   of a ComputedTrait

The file lists all members, in any order; users that are missing are removed. A
file that ends in .gz is sent as it is. With --increment the lines only add
members, or remove them with {"userId": "u1", "member": false}. Posthorn cannot
detect that the first command of a pipe failed; write to a file first.

A sync takes effect as a whole or not at all. The changes are computed at once;
the identify calls follow as fast as the destinations accept them, and --wait
waits until all are queued. KEY is the audience's key; see 'posthorn get audiences -o wide'.`,
		Example: `  posthorn audience sync first_time_shoppers members.ndjson --write-key demo
  psql -Atc "select json_build_object('userId', id) from shoppers" >members.ndjson &&
    posthorn audience sync first_time_shoppers members.ndjson --write-key demo`,
		Args: command.ExactArgs("KEY", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			members, err := openMembers(args[1], cmd.InOrStdin())
			if err != nil {
				return err
			}
			defer members.close()
			o.setRemoval = cmd.Flags().Changed("allow-removal")
			to, stop, err := c.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer stop()
			path := "/v1/audiences/" + url.PathEscape(args[0]) + "/members"
			req, err := o.request(cmd.Context(), to, path, members)
			if err != nil {
				return err
			}
			client := http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: to.tls,
				ExpectContinueTimeout: 10 * time.Second, DisableCompression: true}}
			hide := showProgress(cmd.ErrOrStderr(), members.progress)
			resp, err := client.Do(req)
			hide()
			if dial, ok := errors.AsType[*net.OpError](err); ok && dial.Op == "dial" {
				return fmt.Errorf("%w\nNothing was sent; check that Posthorn runs at this address", err)
			} else if err != nil {
				return fmt.Errorf("%w\nThe result of the sync is unknown; it is safe to send it again", err)
			}
			defer resp.Body.Close()
			result, err := printSyncResult(cmd.OutOrStdout(), objects, resp)
			switch {
			case err != nil || result.Sent || o.dryRun:
				return err
			case wait:
				return awaitSent(cmd, &client, to, path, result.Sync)
			}
			fmt.Fprintln(cmd.ErrOrStderr(), "The sync is accepted; its identify calls follow as fast as the destinations accept them. See 'posthorn get audiences', or use --wait.")
			return nil
		},
	}
	c = flags(cmd)
	f := cmd.Flags()
	objects = command.ObjectsFlag(cmd)
	f.BoolVar(&o.increment, "increment", false, "the lines add and remove members; all other members are kept")
	f.Float64Var(&o.allowRemoval, "allow-removal", 0, "percentage of members that this sync may remove (default: the Audience's maxRemovalPercent)")
	f.BoolVar(&o.allowEmpty, "allow-empty", false, "allow an empty file, which removes every member")
	f.BoolVar(&o.resend, "resend", false, "resend unchanged members, for example after adding a destination")
	f.BoolVar(&wait, "wait", false, "wait until every identify call is in the queue")
	f.BoolVar(&o.dryRun, "dry-run", false, "only print what would change")
	return cmd
}

// syncOptions are the options of a sync.
type syncOptions struct {
	increment, allowEmpty, resend, dryRun bool
	// allowRemoval is a percentage, if setRemoval is true.
	allowRemoval float64
	setRemoval   bool
}

// request makes the request of a sync at the path of an audience's members.
func (o syncOptions) request(ctx context.Context, to trackingAPI, path string, m *memberFile) (*http.Request, error) {
	query := url.Values{}
	if o.setRemoval {
		query.Set("allowRemoval", strconv.FormatFloat(o.allowRemoval, 'g', -1, 64))
	}
	for name, set := range map[string]bool{"allowEmpty": o.allowEmpty, "resend": o.resend, "dryRun": o.dryRun} {
		if set {
			query.Set(name, "true")
		}
	}
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	method := http.MethodPut
	if o.increment {
		method = http.MethodPost
	}
	req, err := to.request(ctx, method, path, m)
	if err != nil {
		return nil, err
	}
	if m.size >= 0 {
		req.ContentLength = m.size
		if m.size == 0 {
			req.Body = http.NoBody
		}
	}
	req.Header.Set("Content-Type", "application/x-ndjson")
	// The server can refuse the request before the body is sent.
	req.Header.Set("Expect", "100-continue")
	if m.gzip {
		req.Header.Set("Content-Encoding", "gzip")
	}
	return req, nil
}

// memberFile is a file of members, or standard input. Any goroutine may call progress.
type memberFile struct {
	in io.Reader
	// size is -1 if it is unknown.
	size  int64
	gzip  bool
	close func()
	// sent counts the bytes read; end is true after the last one.
	sent atomic.Int64
	end  atomic.Bool
}

// openMembers opens a file, or stdin if the name is "-".
func openMembers(name string, stdin io.Reader) (*memberFile, error) {
	m := &memberFile{in: stdin, size: -1, gzip: strings.HasSuffix(name, ".gz"), close: func() {}}
	if name == "-" {
		return m, nil
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, command.UsageError(err)
	}
	info, err := file.Stat()
	if err == nil && info.IsDir() {
		file.Close()
		return nil, command.Usagef("%s is a folder; name a file", name)
	}
	if err == nil && info.Mode().IsRegular() {
		m.size = info.Size()
	}
	m.in, m.close = file, func() { file.Close() }
	return m, nil
}

// Read implements io.Reader.
func (m *memberFile) Read(p []byte) (int, error) {
	n, err := m.in.Read(p)
	m.sent.Add(int64(n))
	if errors.Is(err, io.EOF) {
		m.end.Store(true)
	}
	return n, err
}

func (m *memberFile) progress() string { return sentLine(m.sent.Load(), m.size, m.end.Load()) }

// syncError is an answer that refuses a sync.
type syncError struct {
	Code, Message string
	// Line of the input, from 1; 0 if the error is not in a line.
	Line int64
}

func (e *syncError) Error() string { return e.Code + ": " + e.Message }

// readSyncAnswer decodes the answer to a sync, an adminapi.SyncResult, or to a request for its
// progress, an adminapi.SyncProgress. A refusal is a *syncError.
func readSyncAnswer[T adminapi.SyncResult | adminapi.SyncProgress](resp *http.Response) (answer T, err error) {
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return answer, err
	}
	var outcome struct {
		Success bool
		Error   syncError
	}
	if err := errors.Join(json.Unmarshal(text, &outcome), json.Unmarshal(text, &answer)); err != nil {
		return answer, fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(text)))
	}
	if !outcome.Success {
		return answer, &outcome.Error
	}
	return answer, nil
}

// printSyncResult prints the answer to a sync.
func printSyncResult(out io.Writer, objects *command.Objects, resp *http.Response) (adminapi.SyncResult, error) {
	r, err := readSyncAnswer[adminapi.SyncResult](resp)
	if refused, ok := errors.AsType[*syncError](err); ok {
		where := ""
		if refused.Line > 0 {
			where = fmt.Sprintf("line %d: ", refused.Line)
		}
		flag := map[string]string{"empty_snapshot": " (--allow-empty)", "too_many_removals": " (--allow-removal)"}[refused.Code]
		return r, fmt.Errorf("sync refused, nothing was changed (%s): %s%s%s", refused.Code, where, refused.Message, flag)
	} else if err != nil {
		return r, err
	}
	if objects.Chosen() {
		return r, objects.Print(out, r)
	}
	verb, again := "", ""
	if r.DryRun {
		verb = "would be: "
	}
	if r.Resent > 0 {
		again = fmt.Sprintf(", resent %d", r.Resent)
	}
	fmt.Fprintf(out, "%smembers %d, added %d, removed %d, changed %d%s\n", verb, r.Members, r.Added, r.Removed, r.Changed, again)
	return r, nil
}

// awaitSent waits until every identify call of a sync is in the queue.
func awaitSent(cmd *cobra.Command, client *http.Client, to trackingAPI, members, sync string) error {
	var last atomic.Pointer[adminapi.SyncProgress]
	stop := func() {}
	defer func() { stop() }()
	for failures := 0; ; {
		p, err := askProgress(cmd.Context(), client, to, members)
		switch {
		case err != nil && cmd.Context().Err() != nil:
			return cmd.Context().Err()
		case err != nil:
			// The pod restarts or is being updated; the sync continues afterwards.
			if failures++; failures > 60 {
				return fmt.Errorf("the sync is accepted, but its progress is unknown: %w", err)
			}
		case p.Sync != sync || p.Sent:
			return nil
		default:
			failures = 0
			if last.Swap(&p) == nil {
				stop = showProgress(cmd.ErrOrStderr(), func() string { return queuedLine(last.Load()) })
			}
		}
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-time.After(time.Second):
		}
	}
}

func askProgress(ctx context.Context, client *http.Client, to trackingAPI, members string) (p adminapi.SyncProgress, err error) {
	req, err := to.request(ctx, http.MethodGet, members, nil)
	if err != nil {
		return p, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	return readSyncAnswer[adminapi.SyncProgress](resp)
}

// showProgress redraws a progress line, on a terminal only, until stop is called.
func showProgress(w io.Writer, line func() string) (stop func()) {
	if !command.IsTerminal(w) {
		return func() {}
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				command.RedrawLine(w, "")
				return
			case <-tick.C:
				command.RedrawLine(w, line())
			}
		}
	}()
	return func() { close(done); <-ended }
}

// sentLine describes the progress of an upload of size bytes (-1: unknown).
func sentLine(sent, size int64, end bool) string {
	line := fmt.Sprintf("sent %.1f MB", float64(sent)/1e6)
	if size > 0 {
		line = fmt.Sprintf("%s  %.1f of %.1f MB", bar(sent, size), float64(sent)/1e6, float64(size)/1e6)
	}
	if end {
		line += ", comparing with the last sync"
	}
	return line
}

// queuedLine describes how many identify calls are in the queue, and the reason for the wait.
func queuedLine(p *adminapi.SyncProgress) string {
	all := p.Changes()
	line := fmt.Sprintf("%s  %d of %d queued", bar(all-p.Unsent, all), all-p.Unsent, all)
	if p.Waits != "" {
		line += "; " + p.Waits
	}
	return line
}

func bar(done, all int64) string {
	const width = 30
	if done >= all {
		done, all = 1, 1
	}
	full := int(width * done / all)
	return fmt.Sprintf("[%s%s] %3d %%", strings.Repeat("#", full), strings.Repeat(".", width-full), 100*done/all)
}
