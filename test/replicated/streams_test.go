package replicated

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/test/wait"
)

// stream is the name of the stream of the only slot.
const stream = "PH_test_W0"

// administrator returns a client that may change the streams.
func (s *servers) administrator() jetstream.JetStream {
	s.t.Helper()
	nc, err := nats.Connect(s.url, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		s.t.Fatal(err)
	}
	return js
}

// settings returns the settings of a stream.
func (s *servers) settings(js jetstream.JetStream, name string) (c jetstream.StreamConfig) {
	s.t.Helper()
	if err := wait.Until(func() error {
		found, err := js.Stream(s.t.Context(), name)
		if err == nil {
			c = found.CachedInfo().Config
		}
		return err
	}); err != nil {
		s.t.Fatalf("read the settings of %s: %v", name, err)
	}
	return c
}

// notReady returns an error unless a process is not ready, with some texts as the reason.
func (p *pod) notReady(texts ...string) error {
	resp, err := http.Get("http://" + p.calls + "/readyz") //nolint:noctx // a local poll
	if err != nil {
		return err
	}
	body := readAll(resp)
	if resp.StatusCode != http.StatusServiceUnavailable {
		return fmt.Errorf("/readyz of %s: got status %d, want 503", p.name, resp.StatusCode)
	}
	for _, text := range texts {
		if !strings.Contains(body, text) {
			return fmt.Errorf("/readyz of %s: got %q, want %q", p.name, body, text)
		}
	}
	return nil
}

// readAll returns the body of an answer.
func readAll(resp *http.Response) string {
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return string(body)
}

func waitNotReady(t *testing.T, pods []*pod, texts ...string) {
	t.Helper()
	for _, p := range pods {
		if err := wait.Until(func() error { return p.notReady(texts...) }); err != nil {
			t.Fatal(err)
		}
	}
}

// adoptFiles runs posthorn replication adopt with the files of a process, which is not ready.
func (s *servers) adoptFiles(p *pod) {
	s.t.Helper()
	out, err := s.adopt("--data", p.data)
	if err != nil || !strings.Contains(out, "slot 0 continues with the files in "+p.data) {
		s.t.Fatalf("posthorn replication adopt: got error %v and\n%s", err, out)
	}
}

// restart stops all servers, changes their files, and starts them again.
func (s *servers) restart(change func() error) {
	s.t.Helper()
	for i := range s.nodes {
		s.stop(i)
	}
	if err := change(); err != nil {
		s.t.Fatal(err)
	}
	for i := range s.nodes {
		s.start(i)
	}
}

// A stream that is deleted, created again or restored from a backup under running processes makes none of
// them lose a message: they are not ready, name the fix, and continue with the files of the owner after
// it. Messages are pending meanwhile.
func TestStreamIsReplacedUnderProcesses(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 2, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")
	js := s.administrator()
	all := &sender{pods: pods}
	send := func(prefix string) {
		t.Helper()
		stop := all.start(t, prefix)
		acknowledge(t, all, 200)
		stop()
	}
	continues := func(before *pod, prefix string) {
		t.Helper()
		checkRefused(t, pods)
		s.adoptFiles(before)
		ownerOfCopied(t, pods)
		r.answer.Store(0)
		send(prefix)
		checkLedger(t, pods, all, r)
		if n := int(report(t, pods).Accepted); n != len(all.acknowledged) {
			t.Errorf("accepted calls: got %d, want the %d acknowledged ones", n, len(all.acknowledged))
		}
	}

	before := ownerOfCopied(t, pods)
	r.answer.Store(http.StatusServiceUnavailable)
	send("deleted")
	settings := s.settings(js, stream)
	if err := js.DeleteStream(t.Context(), stream); err != nil {
		t.Fatal(err)
	}
	waitNotReady(t, pods, stream, "the stream does not exist", "object store", "posthorn replication adopt")
	settings.Metadata = nil
	if err := wait.Until(func() error {
		// An attempt without an answer can have created it.
		_, err := js.CreateOrUpdateStream(t.Context(), settings)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	waitNotReady(t, pods, "the stream is not the one of the local files", "posthorn replication adopt --data")
	continues(before, "created-again")

	backup := t.TempDir()
	s.restart(func() (err error) {
		for i := range s.nodes {
			err = errors.Join(err, os.CopyFS(filepath.Join(backup, fmt.Sprint(i)), os.DirFS(s.files(i))))
		}
		return err
	})
	before = ownerOfCopied(t, pods)
	r.answer.Store(http.StatusServiceUnavailable)
	send("after-the-backup")
	waitCopied(t, before, pods) // A copy that is older than the backup is a part of it.
	s.restart(func() (err error) {
		for i := range s.nodes {
			err = errors.Join(err, os.RemoveAll(s.files(i)), os.CopyFS(s.files(i), os.DirFS(filepath.Join(backup, fmt.Sprint(i)))))
		}
		return err
	})
	waitNotReady(t, pods, "the stream lacks records that it had acknowledged", "restored from a backup", "posthorn replication adopt")
	continues(before, "restored")
}

// ownerOfCopied returns the owner when all other processes have a copy.
func ownerOfCopied(t *testing.T, pods []*pod) *pod {
	t.Helper()
	now := owner(t, pods)
	for _, p := range pods {
		if p != now {
			waitReady(t, p)
		}
	}
	return now
}

// waitCopied waits until all processes have what the owner has written until now. The owner waits for the log only
// before answers, so its last writes, for example the status of an object, can be in a later record: the second one
// from now has them, with or without a record in flight.
func waitCopied(t *testing.T, now *pod, pods []*pod) {
	t.Helper()
	var want uint64
	for i, p := range append([]*pod{now}, pods...) {
		if err := wait.Until(func() error {
			s, err := p.state(t.Context())
			if i == 0 {
				want = s.Sequence + 2 // An idle owner writes a record each second.
			} else if err == nil && s.Sequence < want {
				err = fmt.Errorf("%s has record %d, want %d", p.name, s.Sequence, want)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// checkRefused sends a call to each process, which must not acknowledge it.
func checkRefused(t *testing.T, pods []*pod) {
	t.Helper()
	for _, p := range pods {
		if (&sender{pods: []*pod{p}}).send(0, `{"batch":[{"type":"track","event":"E","userId":"u"}]}`) {
			t.Fatalf("%s: it acknowledged a call, want none without the records of the log", p.name)
		}
	}
}
