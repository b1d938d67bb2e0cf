package replicated

import (
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// storeConfigs writes the Secrets with the live configs that the operator writes, and its marker. change replaces one.
func storeConfigs(t *testing.T, e *env.Env, configs map[string]liveconfig.Stored) (change func(namespace string, to liveconfig.Stored)) {
	t.Helper()
	client, err := kubernetes.NewForConfig(e.Config)
	check.NoError(t, "make a client", err)
	_, err = client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: env.Release}},
		metav1.CreateOptions{})
	check.NoError(t, "create the namespace", err)
	secrets := client.CoreV1().Secrets(env.Release)
	secret := func(name string, data map[string][]byte) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{liveconfig.LabelLive: "true"}}, Data: data}
	}
	live := func(namespace string, s liveconfig.Stored) *corev1.Secret {
		return secret(liveconfig.SecretName(namespace), map[string][]byte{liveconfig.DataKey: s.Config, liveconfig.HeadKey: s.Head})
	}
	for namespace, stored := range configs {
		_, err = secrets.Create(t.Context(), live(namespace, stored), metav1.CreateOptions{})
		check.NoError(t, "create the live config of "+namespace, err)
	}
	_, err = secrets.Create(t.Context(), secret(liveconfig.MarkerName, nil), metav1.CreateOptions{})
	check.NoError(t, "create the marker", err)
	return func(namespace string, to liveconfig.Stored) {
		t.Helper()
		_, err := secrets.Update(t.Context(), live(namespace, to), metav1.UpdateOptions{})
		check.NoError(t, "change the live config of "+namespace, err)
	}
}

// startDispatchers starts a process of posthorn dispatcher with several slots for each kubeconfig.
func startDispatchers(t *testing.T, s *servers, kubeconfigs ...string) (pods []*pod) {
	t.Helper()
	for _, kubeconfig := range kubeconfigs {
		pods = append(pods, startDispatcher(t, s.url, kubeconfig, filepath.Join(t.TempDir(), "data")))
	}
	return pods
}

func startDispatcher(t *testing.T, url, kubeconfig, data string, flags ...string) *pod {
	t.Helper()
	p := &pod{t: t, name: fmt.Sprint("process-", number.Add(1)-1), data: data, slots: severalSlots}
	p.Posthorn = &process.Posthorn{Binary: binary, Addr: process.FreeAddr(), Admin: process.FreeAddr()}
	p.Args = append([]string{
		"dispatcher", "--system-namespace", env.Release, "--kubeconfig", kubeconfig, "--pod-name", p.name, "--data", p.data,
		"--listen", p.Addr, "--admin-listen", p.Admin, "--admin-auth", "none", "--peer-listen", "127.0.0.1:0", "--egress-allow", "127.0.0.0/8",
		"--replication-url", url, "--replication-name", "several", "--replication-installation", installation, "--replication-slots",
		strconv.Itoa(severalSlots), "--replication-max-bytes", strconv.Itoa(jetstream.MinBytes),
	}, flags...)
	p.launch()
	return p
}

// ownersOf waits until each slot has one owner among the processes and a copy in another one, and the processes own as
// many slots as each other, or one more. It returns the owners of the slots.
func ownersOf(t *testing.T, pods []*pod) (owners [severalSlots]*pod) {
	t.Helper()
	if err := wait.Until(func() error {
		owners = [severalSlots]*pod{}
		var copies [severalSlots]int
		for _, p := range pods {
			states, err := (&adminapi.Client{URL: "http://" + p.Admin, HTTP: &http.Client{Timeout: 2 * time.Second}}).Slots(t.Context())
			if err != nil {
				return err
			}
			owned := 0
			for _, s := range states {
				switch {
				case s.Owner && owners[s.Slot] != nil:
					return fmt.Errorf("slot %d has the owners %s and %s", s.Slot, owners[s.Slot].name, p.name)
				case s.Owner:
					owners[s.Slot] = p
					owned++
				case s.Ready:
					copies[s.Slot]++
				}
			}
			if least := severalSlots / len(pods); owned < least || owned > least+min(1, severalSlots%len(pods)) {
				return fmt.Errorf("%s owns %d slots", p.name, owned)
			}
		}
		for slot, p := range owners {
			if p == nil || copies[slot] == 0 {
				return fmt.Errorf("slot %d: owner %v, %d copies", slot, p != nil, copies[slot])
			}
		}
		return nil
	}); err != nil {
		t.Fatalf("%d slots of %d processes, want one owner and a copy of each: %v", severalSlots, len(pods), err)
	}
	return owners
}

// severalLedger waits until no message is pending, and returns the sum of the ledgers of all slots.
func severalLedger(t *testing.T, pods []*pod) (total queue.Ledger) {
	t.Helper()
	if err := wait.Until(func() error {
		total = queue.Ledger{}
		for slot, p := range ownersOf(t, pods) {
			r, err := p.AdminAPI().Slot(slot).Report(t.Context(), "")
			if err != nil {
				return err
			}
			for _, n := range r.Namespaces {
				for _, source := range n.Sources {
					if err := queue.Ledger(source.Messages).Balance(); err != nil {
						return wait.Stop(fmt.Errorf("namespace %s in slot %d: %w", n.Namespace, slot, err))
					}
					total = total.Plus(queue.Ledger(source.Messages))
				}
			}
		}
		if total.Pending != 0 {
			return fmt.Errorf("got %+v", total)
		}
		return nil
	}); err != nil {
		t.Fatalf("ledgers, want them balanced and nothing pending: %v", err)
	}
	return total
}

// Three processes of posthorn dispatcher share four slots. One is killed with its disk, and later stopped: the others
// take its slots over, it gets slots again, and no acknowledged call is lost.
func TestSeveralSlotsOfProcesses(t *testing.T) {
	t.Parallel()
	e, _ := env.For(t)
	s, r := startServers(t), newReceiver(t)
	storeConfigs(t, e, severalConfigs(t, r.URL))
	pods := startDispatchers(t, s, e.Kubeconfig(), e.Kubeconfig(), e.Kubeconfig())
	owners := ownersOf(t, pods)
	l, stop := startLoad(t, pods[0].calls, pods[1].calls, pods[2].calls)
	l.progress(t)

	most := 0
	for _, f := range []struct {
		name       string
		begin, end func(*pod)
	}{
		{"kill -9 of a process, and loss of its disk", (*pod).lose, (*pod).start},
		{"SIGSTOP of a process", func(p *pod) { _ = syscall.Kill(p.Pid(), syscall.SIGSTOP) }, func(p *pod) {
			_ = syscall.Kill(p.Pid(), syscall.SIGCONT)
		}},
	} {
		lost := owners[0]
		var others []*pod
		for _, p := range pods {
			if p != lost {
				others = append(others, p)
			}
		}
		most += severalNamespaces*severalInFlight + r.receivedWithin(positionsWithin, time.Now())
		f.begin(lost)
		ownersOf(t, others)
		gap := l.progress(t)
		f.end(lost)
		owners = ownersOf(t, pods)
		moved := l.progress(t)
		t.Logf("%s: longest time without an acknowledged call of a namespace %v, and %v when it gets slots again", f.name, gap.Round(10*time.Millisecond), moved.Round(10*time.Millisecond))
		_, bound := fault{claims: 1, lost: true}.promised()
		check.Equal(t, fmt.Sprintf("%s: calls are accepted again after %v, which is at most %v", f.name, gap, bound), gap <= bound, true)
		_, bound = fault{claims: 1}.promised()
		check.Equal(t, fmt.Sprintf("%s: calls are accepted again after the hand-over in %v, which is at most %v", f.name, moved, bound), moved <= bound, true)
		most += severalNamespaces * severalInFlight // A hand-over repeats what is in flight after 2 s.
	}
	stop()
	repeated := checkDelivered(t, l.acknowledged, r)
	ledger := severalLedger(t, pods)
	if int(ledger.Accepted) < len(l.acknowledged) || ledger.Delivered != ledger.Accepted {
		t.Errorf("ledger: got %+v, want all delivered, %d or more", ledger, len(l.acknowledged))
	}
	if repeated > most {
		t.Errorf("repeated deliveries: got %d, want at most %d: those in flight, and those since the last stored positions", repeated, most)
	}
	t.Logf("%d acknowledged calls, %d repeated deliveries of at most %d", len(l.acknowledged), repeated, most)
	for _, id := range l.acknowledged[len(l.acknowledged)-severalNamespaces:] {
		sameCommands(t, pods, "trace "+id+" -A -o json")
	}
	for _, p := range pods {
		// The process that continued may still close its store of a slot that it lost.
		if err := wait.Until(func() error {
			cmd := exec.Command(binary, "slots", "--admin", p.Admin)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != 0 || strings.Count(string(out), " owner ") != severalSlots {
				return fmt.Errorf("exit code %d, output:\n%s", code, out)
			}
			return nil
		}); err != nil {
			t.Errorf("posthorn slots of process %s, want the owners of all slots: %v", p.name, err)
		}
	}
}
