package main

import (
	"cmp"
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
	"golang.org/x/term"
)

// audienceOwner returns the URL of the pod that keeps the members of audiences,
// or "" when it is this one. It is pod 0 of the StatefulSet: the one that exists
// as long as any does. A pod whose name ends in no number is alone.
func audienceOwner(pod, namespace, service, listen string) string {
	set, number, ok := cutLast(pod, "-")
	if n, err := strconv.Atoi(number); !ok || err != nil || n < 1 {
		return ""
	}
	_, port, _ := net.SplitHostPort(listen)
	return "http://" + net.JoinHostPort(fmt.Sprintf("%s-0.%s.%s", set, cmp.Or(service, set), namespace), cmp.Or(port, "8080"))
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// peerService finds the headless Service of a StatefulSet's pod in what the
// kubelet writes to /etc/hosts: ADDRESS POD.SERVICE.NAMESPACE.svc.DOMAIN POD.
func peerService(hosts, pod, namespace string) string {
	for word := range strings.FieldsSeq(hosts) {
		if rest, ok := strings.CutPrefix(word, pod+"."); ok {
			if service, rest, ok := strings.Cut(rest, "."); ok && strings.HasPrefix(rest, namespace+".") {
				return service
			}
		}
	}
	return ""
}

func newAudience(way calling) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audience",
		Short: "Sync the members of an audience",
		Args:  onlyCommands,
		RunE:  showHelp,
	}
	cmd.AddCommand(newAudienceSync(way))
	return cmd
}

func newAudienceSync(way calling) *cobra.Command {
	var c caller
	var increment, allowEmpty, dryRun bool
	var allowRemoval float64
	cmd := &cobra.Command{
		Use:   "sync KEY FILE|-",
		Short: "Send all members of an audience; who joined, left or changed is told",
		Long: `Sends a file (or standard input) of members, one JSON object a line:

  {"userId": "u1"}                  of an Audience
  {"userId": "u1", "value": 12.5}   of a ComputedTrait

The file lists all members, in any order; who is missing has left. A file that
ends in .gz is sent as it is. With --increment the lines only add members, or
remove them with {"userId": "u1", "member": false}.

A sync takes effect as a whole or not at all. KEY is the audience's key; see
'posthorn get audiences -o wide'.`,
		Example: `  posthorn audience sync first_time_shoppers members.ndjson --write-key demo
  psql -Atc "select json_build_object('userId', id) from shoppers" | posthorn audience sync first_time_shoppers - --write-key demo`,
		Args: exactArgs("KEY", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			body, size := cmd.InOrStdin(), int64(-1)
			if args[1] != "-" {
				file, err := os.Open(args[1])
				if err != nil {
					return usagef("%v", err)
				}
				defer file.Close()
				if info, err := file.Stat(); err == nil && info.Mode().IsRegular() {
					size = info.Size()
				}
				body = file
			}
			query := url.Values{}
			if cmd.Flags().Changed("allow-removal") {
				query.Set("allowRemoval", strconv.FormatFloat(allowRemoval, 'g', -1, 64))
			}
			for name, set := range map[string]bool{"allowEmpty": allowEmpty, "dryRun": dryRun} {
				if set {
					query.Set(name, "true")
				}
			}
			method := http.MethodPut
			if increment {
				method = http.MethodPost
			}
			to, stop, err := c.ingest(cmd.Context())
			if err != nil {
				return err
			}
			defer stop()
			path := "/v1/audiences/" + url.PathEscape(args[0]) + "/members"
			if len(query) > 0 {
				path += "?" + query.Encode()
			}
			counted := &countingReader{Reader: body}
			req, err := to.request(cmd.Context(), method, path, counted)
			if err != nil {
				return err
			}
			if size >= 0 {
				req.ContentLength = size
				if size == 0 {
					req.Body = http.NoBody
				}
			}
			req.Header.Set("Content-Type", "application/x-ndjson")
			// A refusal that needs no body comes before the body is sent.
			req.Header.Set("Expect", "100-continue")
			if strings.HasSuffix(args[1], ".gz") {
				req.Header.Set("Content-Encoding", "gzip")
			}
			hide := showProgress(cmd.ErrOrStderr(), counted, size)
			client := http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: to.tls, ExpectContinueTimeout: 10 * time.Second, DisableCompression: true}}
			resp, err := client.Do(req)
			hide()
			if err != nil {
				return fmt.Errorf("%w\nNothing is known of the sync; send it again, that is safe", err)
			}
			defer resp.Body.Close()
			return tellSync(cmd.OutOrStdout(), resp)
		},
	}
	c = way(cmd)
	f := cmd.Flags()
	f.BoolVar(&increment, "increment", false, "the lines add and remove members; who is not named stays")
	f.Float64Var(&allowRemoval, "allow-removal", 0, "percentage of members that this sync may remove (default: the Audience's maxRemovalPercent)")
	f.BoolVar(&allowEmpty, "allow-empty", false, "an empty file is meant: all members leave")
	f.BoolVar(&dryRun, "dry-run", false, "only say what would change")
	return cmd
}

// tellSync prints the answer to a sync.
func tellSync(out io.Writer, resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	var answer struct {
		Success                          bool
		Members, Added, Removed, Changed int64
		Sent, DryRun                     bool
		Error                            struct {
			Code, Message string
			Line          int64
		}
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return answerError(resp.Status, text)
	}
	if !answer.Success {
		where := ""
		if answer.Error.Line > 0 {
			where = fmt.Sprintf("line %d: ", answer.Error.Line)
		}
		return fmt.Errorf("refused, nothing was changed (%s): %s%s", answer.Error.Code, where, answer.Error.Message)
	}
	verb := ""
	if answer.DryRun {
		verb = "would be: "
	}
	fmt.Fprintf(out, "%smembers %d, added %d, removed %d, changed %d\n", verb, answer.Members, answer.Added, answer.Removed, answer.Changed)
	if !answer.Sent && !answer.DryRun {
		fmt.Fprintln(out, "The sync is taken; its identify calls are still being put into the queue.")
	}
	return nil
}

// countingReader counts what was read, from any goroutine.
type countingReader struct {
	io.Reader
	n   atomic.Int64
	end atomic.Bool
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	if errors.Is(err, io.EOF) {
		c.end.Store(true)
	}
	return n, err
}

// showProgress draws how much of size (-1: unknown) was sent, on a terminal
// only, until stop is called.
func showProgress(w io.Writer, c *countingReader, size int64) (stop func()) {
	file, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
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
				fmt.Fprint(w, "\r\033[K")
				return
			case <-tick.C:
				fmt.Fprint(w, "\r\033[K"+progressLine(c.n.Load(), size, c.end.Load()))
			}
		}
	}()
	return func() { close(done); <-ended }
}

// progressLine is a bar when the size is known.
func progressLine(sent, size int64, end bool) string {
	const width = 30
	line := fmt.Sprintf("sent %.1f MB", float64(sent)/1e6)
	if size > 0 {
		full := int(width * min(sent, size) / size)
		line = fmt.Sprintf("[%s%s] %3d %%  %.1f of %.1f MB", strings.Repeat("#", full), strings.Repeat(".", width-full), 100*min(sent, size)/size, float64(sent)/1e6, float64(size)/1e6)
	}
	if end {
		line += ", comparing with the last sync"
	}
	return line
}
