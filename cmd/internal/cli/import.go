package cli

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/internal/durable"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	// A batch of an import has at most this many calls and bytes; the server accepts 500 KiB.
	importCalls = 500
	importBytes = 480 << 10
	// maxImportLine bounds the memory for a line. The server accepts calls of 32 KiB.
	maxImportLine = 1 << 20
	// printedLines is the number of rejected lines that are printed.
	printedLines = 20
	// importPause is the time before a failed request is repeated; it doubles up to the maximum.
	importPause, maxImportPause = 500 * time.Millisecond, 30 * time.Second
)

func newImport(flags senderFlags) *cobra.Command {
	var c sender
	i := importer{pause: importPause}
	var rejectedFile string
	var perSecond int
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "import FILE|-",
		Short: "Import calls from a file, one per line",
		Long: `Sends the calls of a file, or of standard input (-), in their order. Each line is a
call as JSON with its "type"; a "timestamp" gives the time of past data, and is not
corrected by a "sentAt". Lines whose timestamp is not a time are reported. Files that
end with .gz are decompressed.

A line without a messageId gets one that depends on the name of the file, the number
of the line, and its content. Lines that are not valid calls are reported with their
number; the others are imported. After 429, 5xx and connection errors a request is
retried until Ctrl-C. Other responses that are not Posthorn's, such as the 404 of a
wrong address, end the import.

FILE.posthorn-import has the last imported line, so the same command continues after
an interruption; it is removed at the end. At most the batch that was interrupted is
sent again, with the same messageIds: the server drops the repetition within its
duplicate window (10 minutes by default). After that window its calls are delivered
again. Standard input has no such file; use --from-line.

Exits 1 if lines were rejected.`,
		Example: `  posthorn import history.ndjson --write-key demo
  posthorn import history.ndjson.gz --write-key demo --rate 500 --rejected rejected.ndjson
  zcat history.gz | posthorn import - --write-key demo --from-line 20001`,
		Args: command.ExactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if i.from < 1 {
				return command.Usagef("--from-line %d: lines are counted from 1", i.from)
			}
			if perSecond < 0 {
				return command.Usagef("--rate %d: use the number of calls per second, or 0 for no limit", perSecond)
			}
			file, err := openMembers(args[0], cmd.InOrStdin())
			if err != nil {
				return err
			}
			defer file.close()
			i.in = file
			if file.gzip {
				if i.in, err = gzip.NewReader(file); err != nil {
					return fmt.Errorf("read %s: %w", args[0], err)
				}
			}
			i.name, i.out = filepath.Base(args[0]), cmd.OutOrStdout()
			if objects.Chosen() {
				i.out = cmd.ErrOrStderr() // Standard output has the result alone.
			}
			if args[0] != "-" {
				i.stateFile = args[0] + ".posthorn-import"
				if err := i.load(cmd.Flags().Changed("from-line")); err != nil {
					return err
				}
			}
			if i.state.Line > 0 {
				fmt.Fprintf(i.out, "continuing after line %d\n", i.state.Line)
			}
			if rejectedFile != "" {
				f, err := os.OpenFile(rejectedFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
				if err != nil {
					return command.UsageError(err)
				}
				defer func() { err = errors.Join(err, f.Close()) }()
				i.rejectedFile = f
			}
			if perSecond > 0 {
				i.limit = rate.NewLimiter(rate.Limit(perSecond), max(importCalls, perSecond))
			}
			to, stop, err := c.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer stop()
			i.to = to
			i.client = &http.Client{Timeout: time.Minute, Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: to.tls}}
			i.began = time.Now()
			endProgress := showProgress(cmd.ErrOrStderr(), func() string { return i.progress(file) })
			err = i.run(cmd.Context())
			endProgress()
			err = i.finish(args[0], err)
			if objects.Chosen() {
				return errors.Join(err, objects.Print(cmd.OutOrStdout(), i.state))
			}
			return err
		},
	}
	c = flags(cmd)
	f := cmd.Flags()
	objects = command.ObjectsFlag(cmd)
	f.StringVar(&rejectedFile, "rejected", "", "append rejected lines to this file, as NDJSON with number, code, message and the line")
	f.IntVar(&perSecond, "rate", 0, "maximum number of calls per second; 0 is no limit")
	f.Int64Var(&i.from, "from-line", 1, "skip the lines before this one; instead of the position of an interrupted import")
	return cmd
}

// importState is the content of the file that an interrupted import leaves.
type importState struct {
	// Line is the number of the last line that the server answered, and SHA256 its hash.
	Line   int64  `json:"line"`
	SHA256 string `json:"sha256"`
	// Accepted and Rejected count lines, and Undated the accepted ones without a time.
	Accepted int64 `json:"accepted"`
	Rejected int64 `json:"rejected"`
	Undated  int64 `json:"undated"`
	// Unread counts the accepted lines with a timestamp that is not a time.
	Unread int64 `json:"unread"`
}

// importer sends the lines of a file.
type importer struct {
	in        io.Reader
	name      string
	from      int64
	stateFile string // "" without one
	to        trackingAPI
	client    *http.Client
	limit     *rate.Limiter // nil without a limit
	pause     time.Duration // before the first repetition of a request
	out       io.Writer
	// rejectedFile gets the rejected lines; nil without a file.
	rejectedFile io.Writer

	state   importState
	saved   time.Time
	began   time.Time
	sent    atomic.Int64 // lines of this run that the server answered, for the progress
	waiting atomic.Pointer[string]
	reason  string // why it waits; "" if it does not
	printed int
}

// importLine is a line of the input.
type importLine struct {
	number  int64
	text    []byte // the call, with a messageId
	hash    [sha256.Size]byte
	undated bool
	unread  event.Defects
}

// load reads the position of an interrupted import.
func (i *importer) load(ignore bool) error {
	text, err := os.ReadFile(i.stateFile)
	if ignore || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(text, &i.state)
	}
	if err != nil {
		return fmt.Errorf("read the position of the last import: %w; remove %s to begin again", err, i.stateFile)
	}
	i.from = i.state.Line + 1
	return nil
}

// save writes the position, at most once a second unless now is true.
func (i *importer) save(now bool) error {
	if i.stateFile == "" || !now && time.Since(i.saved) < time.Second {
		return nil
	}
	text, err := json.Marshal(i.state)
	if err != nil {
		return err
	}
	i.saved = time.Now()
	return durable.Replace(i.stateFile, append(text, '\n'), 0o600)
}

// run sends all lines, one batch after the other.
func (i *importer) run(ctx context.Context) error {
	lines := bufio.NewReaderSize(i.in, 64<<10)
	var batch []importLine
	size := 0
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		if err := i.sendAll(ctx, batch); err != nil {
			return err
		}
		batch, size = batch[:0], 0
		return i.save(false)
	}
	for number := int64(1); ; number++ {
		text, whole, err := readLine(lines)
		if errors.Is(err, io.EOF) {
			return flush()
		}
		if err != nil {
			return fmt.Errorf("read line %d: %w", number, err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if number < i.from {
			if number == i.state.Line && hashOf(text) != i.state.SHA256 {
				return fmt.Errorf("line %d is not the one that the interrupted import sent: the file was changed; restore it, or remove %s, or set --from-line", number, i.stateFile)
			}
			continue
		}
		line, problem := i.parse(number, text, whole)
		if problem != "" {
			// The lines before it are answered first, so that the position only moves forward.
			if err := flush(); err != nil {
				return err
			}
			if err := i.reject(line, text, "invalid_line", problem); err != nil {
				return err
			}
			i.answered(line)
			continue
		}
		if line.text == nil { // an empty line
			continue
		}
		if len(batch) == importCalls || size+len(line.text) > importBytes {
			if err := flush(); err != nil {
				return err
			}
		}
		batch, size = append(batch, line), size+len(line.text)+1
	}
}

// readLine returns the next line without its end, and whether it is not longer than maxImportLine.
func readLine(r *bufio.Reader) (line []byte, whole bool, err error) {
	whole = true
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxImportLine {
			whole = false
		} else {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF) && len(line) > 0, err == nil:
			return bytes.TrimRight(line, "\r\n"), whole, nil
		}
		return nil, false, err
	}
}

func hashOf(line []byte) string {
	sum := sha256.Sum256(line)
	return hex.EncodeToString(sum[:])
}

// parse checks a line and adds its messageId. The problem is not empty if the line is not a call.
func (i *importer) parse(number int64, text []byte, whole bool) (line importLine, problem string) {
	line = importLine{number: number, hash: sha256.Sum256(text)}
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf"))
	text = bytes.TrimSpace(text)
	if !whole {
		return line, fmt.Sprintf("the line is longer than %d bytes", maxImportLine)
	}
	if len(text) == 0 {
		return line, ""
	}
	var call map[string]json.RawMessage
	if err := json.Unmarshal(text, &call); err != nil || call == nil {
		problem := "the line is not a JSON object"
		switch {
		case text[0] == '[':
			problem += "; write one object per line, as jq -c '.[]' does with an array"
		case number == 1 && text[0] != '{':
			problem += "; the file must have one per line, other formats such as CSV are not read"
		}
		return line, problem
	}
	var typ string
	_ = json.Unmarshal(call["type"], &typ)
	if _, ok := propertiesOf[typ]; !ok || typ == "batch" {
		return line, `"type" is not one of identify, track, page, screen, group, alias`
	}
	at, unread := event.EventTime(call["timestamp"], call["originalTimestamp"])
	line.undated, line.unread = at.IsZero(), unread
	if isAbsent(call["messageId"]) {
		delete(call, "messageId")
		sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%s", i.name, number, text))
		id := fmt.Sprintf(`{"messageId":"import-%s"`, hex.EncodeToString(sum[:16]))
		rest := bytes.TrimSpace(text[1:])
		if bytes.Contains(text, []byte(`"messageId"`)) { // It is null or "".
			rest, _ = json.Marshal(call)
			rest = rest[1:]
		}
		text = append(append([]byte(id), ','), rest...) // There is a type, so rest has a member.
	}
	line.text = text
	return line, ""
}

// isAbsent reports whether a member is missing, null or an empty string.
func isAbsent(value json.RawMessage) bool {
	return len(value) == 0 || string(value) == "null" || string(value) == `""`
}

// sendAll sends lines as one batch, and as two halves if the server rejects it as a whole.
func (i *importer) sendAll(ctx context.Context, lines []importLine) error {
	if i.limit != nil {
		if err := i.limit.WaitN(ctx, len(lines)); err != nil {
			return err
		}
	}
	return i.sendSome(ctx, lines)
}

func (i *importer) sendSome(ctx context.Context, lines []importLine) error {
	rejected, bad, err := i.post(ctx, lines)
	if err != nil {
		return err
	}
	if bad != nil && len(lines) > 1 {
		half := len(lines) / 2
		if err := i.sendSome(ctx, lines[:half]); err != nil {
			return err
		}
		return i.sendSome(ctx, lines[half:])
	}
	if bad != nil {
		rejected = []importRejection{{0, bad.Code, bad.Message}}
	}
	for n, line := range lines {
		if r := slices.IndexFunc(rejected, func(r importRejection) bool { return r.Index == n }); r >= 0 {
			if err := i.reject(line, line.text, rejected[r].Code, rejected[r].Message); err != nil {
				return err
			}
		} else {
			i.state.Accepted++
			if line.undated {
				i.state.Undated++
			}
			i.reportUnread(line)
		}
		i.answered(line)
	}
	return nil
}

// reportUnread prints that a time of an accepted line was not read.
func (i *importer) reportUnread(line importLine) {
	if line.unread == 0 {
		return
	}
	i.state.Unread++
	instead := "originalTimestamp is used"
	if line.undated {
		instead = "the time of the import is used"
	}
	if i.state.Unread <= printedLines {
		fmt.Fprintf(i.out, "line %d: timestamp is not a time; %s\n", line.number, instead)
	} else if i.state.Unread == printedLines+1 {
		fmt.Fprintln(i.out, "more lines with an unreadable timestamp are counted only")
	}
}

// importRejection is a call of a batch that the server did not accept.
type importRejection struct {
	Index         int
	Code, Message string
}

// importError is an answer that rejects a request.
type importError struct{ Code, Message string }

// post sends a batch until the server accepts or rejects it. bad is the reason why it rejected the
// request as a whole because of its content.
func (i *importer) post(ctx context.Context, lines []importLine) (rejected []importRejection, bad *importError, err error) {
	body := []byte(`{"batch":[`)
	for n, line := range lines {
		if n > 0 {
			body = append(body, ',')
		}
		body = append(body, line.text...)
	}
	body = append(body, "]}"...)
	for try, pause := 1, i.pause; ; try, pause = try+1, min(2*pause, maxImportPause) {
		var answer struct {
			Rejected []importRejection
			Error    importError
		}
		status, after, err := i.try(ctx, body, &answer)
		_, foreign := errors.AsType[foreignResponse](err)
		temporary := status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500
		var why string
		switch {
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case err == nil && status == http.StatusOK:
			i.waiting.Store(nil)
			i.reason = ""
			return answer.Rejected, nil, nil
		case err == nil && (status == http.StatusBadRequest || status == http.StatusRequestEntityTooLarge):
			return nil, &answer.Error, nil
		case foreign:
			why = err.Error()
			if !temporary {
				return nil, nil, fmt.Errorf("%w; set --address to the address of the tracking API, which is --listen of posthorn run, and not --admin-listen", err)
			}
		case err != nil:
			temporary, why = true, i.to.explain(err).Error()
		default:
			why = fmt.Sprintf("the server returned %d %s: %s", status, answer.Error.Code, answer.Error.Message)
		}
		if !temporary {
			return nil, nil, errors.New(why)
		}
		i.waits(why, try, max(pause, after))
		select {
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-time.After(max(pause, after)):
		}
	}
}

// waits shows why the import waits. For outputs that are not terminals it prints each reason once.
func (i *importer) waits(why string, try int, wait time.Duration) {
	text := fmt.Sprintf("%s; try %d, next in %s", why, try, wait)
	i.waiting.Store(&text)
	if why != i.reason {
		i.reason = why
		fmt.Fprintln(i.out, text)
	}
}

// foreignResponse is a response that is not Posthorn's.
type foreignResponse struct{ url, status string }

func (r foreignResponse) Error() string {
	return fmt.Sprintf("%s returned %s, and the response is not Posthorn's", r.url, r.status)
}

// try sends one request. after is the time of Retry-After.
func (i *importer) try(ctx context.Context, body []byte, answer any) (status int, after time.Duration, err error) {
	req, err := i.to.request(ctx, http.MethodPost, "/v1/import", bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := i.client.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return 0, 0, err
	}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		after = time.Duration(seconds) * time.Second
	}
	if json.Unmarshal(text, answer) != nil {
		return resp.StatusCode, after, foreignResponse{req.URL.String(), resp.Status}
	}
	return resp.StatusCode, after, nil
}

// answered moves the position behind a line.
func (i *importer) answered(line importLine) {
	i.state.Line, i.state.SHA256 = line.number, hex.EncodeToString(line.hash[:])
	i.sent.Add(1)
}

// reject reports a line.
func (i *importer) reject(line importLine, text []byte, code, message string) error {
	i.state.Rejected++
	if i.rejectedFile != nil {
		record, err := json.Marshal(struct {
			Line    int64  `json:"line"`
			Code    string `json:"code"`
			Message string `json:"message"`
			Text    string `json:"text"`
		}{line.number, code, message, string(text)})
		if err != nil {
			return err
		}
		if _, err := i.rejectedFile.Write(append(record, '\n')); err != nil {
			return fmt.Errorf("write the rejected lines: %w", err)
		}
	}
	if i.printed++; i.printed <= printedLines {
		fmt.Fprintf(i.out, "line %d rejected: %s (%s)\n", line.number, message, code)
	} else if i.printed == printedLines+1 && i.rejectedFile == nil {
		fmt.Fprintln(i.out, "more rejected lines are counted only; --rejected FILE has all of them")
	}
	return nil
}

func (i *importer) progress(file *memberFile) string {
	line := fmt.Sprintf("%s; %s, %.0f/s", sentLine(file.sent.Load(), file.size, false), plural.Count(i.sent.Load(), "call"), float64(i.sent.Load())/time.Since(i.began).Seconds())
	if why := i.waiting.Load(); why != nil {
		line += "; " + *why
	}
	return line
}

// finish prints the result, and where an interrupted import continues.
func (i *importer) finish(file string, err error) error {
	s, took := i.state, time.Since(i.began)
	fmt.Fprintf(i.out, "%s accepted, %s rejected, in %s (%.0f/s)\n", plural.Count(s.Accepted, "call"), plural.Count(s.Rejected, "line"),
		took.Round(time.Millisecond), float64(i.sent.Load())/took.Seconds())
	if s.Undated > 0 {
		fmt.Fprintf(i.out, "%s without a time: the time of the import is used\n", plural.Count(s.Undated, "call"))
	}
	if s.Unread > 0 {
		fmt.Fprintf(i.out, "%s with a timestamp that is not a time\n", plural.Count(s.Unread, "call"))
	}
	if err != nil {
		if s.Line > 0 {
			err = errors.Join(err, i.save(true))
			next := "the same command continues"
			if i.stateFile == "" {
				next = fmt.Sprintf("--from-line %d continues", s.Line+1)
			}
			fmt.Fprintf(i.out, "line %d of %s is the last one that was answered; %s\n", s.Line, file, next)
		}
		if errors.Is(err, context.Canceled) {
			return command.Interrupted(command.ErrFailed)
		}
		return err
	}
	if i.stateFile != "" {
		if err := os.Remove(i.stateFile); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if s.Rejected > 0 {
		return command.ErrFailed
	}
	return nil
}
