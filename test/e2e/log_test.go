//go:build e2e

package e2e

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// nats is the manifest of three NATS servers that sync each record.
const nats = `
apiVersion: v1
kind: ConfigMap
metadata: {name: nats}
data:
  nats.conf: |
    jetstream { store_dir: /data, sync_interval: always, max_file_store: 32GB }
    http: 8222
    cluster { name: nats, listen: 0.0.0.0:6222, routes: [nats://nats-0.nats:6222, nats://nats-1.nats:6222, nats://nats-2.nats:6222] }
---
apiVersion: v1
kind: Service
metadata: {name: nats}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {app: nats}
  ports: [{name: client, port: 4222}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: nats}
spec:
  replicas: 3
  serviceName: nats
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: nats}}
  template:
    metadata: {labels: {app: nats}}
    spec:
      automountServiceAccountToken: false
      securityContext: {runAsNonRoot: true, runAsUser: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
      terminationGracePeriodSeconds: 5
      volumes: [{name: config, configMap: {name: nats}}, {name: data, emptyDir: {}}]
      containers:
      - name: nats
        image: %s
        args: [-c, /config/nats.conf, --name, $(NAME)]
        env: [{name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        readinessProbe: {httpGet: {path: /healthz, port: 8222}, periodSeconds: 1}
        volumeMounts: [{name: config, mountPath: /config}, {name: data, mountPath: /data}]
        securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`

// startNATS starts three NATS servers and returns their namespace.
func startNATS() namespace {
	GinkgoHelper()
	By("starting three NATS servers")
	servers := namespace{name: "nats"}
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: nats, labels: {pod-security.kubernetes.io/enforce: restricted}}}`)
	DeferCleanup(func() { kubectl("delete", "namespace", "nats", "--timeout=3m") })
	servers.apply(fmt.Sprintf(nats, env("E2E_NATS")))
	servers.kubectl("rollout", "status", "statefulset/nats", "--timeout=3m")
	return servers
}

// installReplicated installs a release whose log is in the NATS servers.
func installReplicated(settings ...string) {
	GinkgoHelper()
	var urls []string
	for n := range 3 {
		urls = append(urls, fmt.Sprintf("nats://nats-%d.nats.nats:4222", n))
	}
	uninstall()
	DeferCleanup(uninstall)
	install(append([]string{
		"--set", "replication.type=JetStream", "--set", `replication.jetStream.url=` + strings.Join(urls, `\,`), "--set",
		"replication.jetStream.name=e2e", "--set", "replication.jetStream.maxBytes=256Mi",
		"--set", "replication.jetStream.monitoringURL=http://nats-0.nats.nats:8222",
	}, settings...)...)
	installed = false // No other spec uses this release.
	ready(dispatcher)
}

var _ = Describe("A replicated log", Serial, Label(cleanStart), func() {
	It("keeps every accepted call when the owner is lost with its disk, a server restarts, and during a rolling update", Label(long), func() {
		servers := startNATS()
		installReplicated("--set", "dispatcher.replicas=2")
		t, s := running("replicated")
		calls := t.load(20)

		By("sending through the standby")
		// owner returns the number of the pod that owns the messages; the other one is a standby.
		owner := func() (n int) {
			GinkgoHelper()
			Eventually(func() error {
				out, _ := command("", "kubectl", "posthorn", "slots")
				found := regexp.MustCompile(`posthorn-dispatcher-(\d) +owner`).FindAllStringSubmatch(out, -1)
				if len(found) != 1 {
					return fmt.Errorf("owners: got %d, want one:\n%s", len(found), out)
				}
				n, _ = strconv.Atoi(found[0][1])
				return nil
			}).Should(Succeed())
			return n
		}
		owner()
		for n := range 2 {
			event := fmt.Sprintf("At %d", n)
			Expect(sendTo(t, n, event)).To(Succeed())
			s.eventually(event)
		}
		wantStatus(t)

		// epoch is the owner's; 0 while one of the two pods does not work.
		epoch := func() (n int) {
			out, _ := command("", "kubectl", "posthorn", "slots")
			owner := regexp.MustCompile(`posthorn-dispatcher-\d +owner +true +(\d+) `).FindStringSubmatch(out)
			if owner != nil && regexp.MustCompile(`posthorn-dispatcher-\d +standby +true `).MatchString(out) {
				n, _ = strconv.Atoi(owner[1])
			}
			return n
		}
		before := 0
		Eventually(func() int { before = epoch(); return before }).Should(BeNumerically(">", 0))
		first := owner()
		By("killing the owner, and deleting its disk")
		// It ends before the shutdown delay, so it does not release the messages.
		kubectl("-n", system, "delete", fmt.Sprint("pod/posthorn-dispatcher-", first), "--grace-period=1", "--timeout=3m")
		// Either of the two pods, of which one starts without a disk, takes over.
		Eventually(epoch).Should(BeNumerically(">", before))
		ready(dispatcher)

		By("deleting a NATS server with its disk")
		servers.kubectl("delete", "pod/nats-1", "--grace-period=0", "--force")
		servers.kubectl("rollout", "status", "statefulset/nats", "--timeout=3m")

		By("restarting all dispatchers")
		kubectl("-n", system, "rollout", "restart", dispatcher)
		ready(dispatcher)
		owner()

		calls.arrived(s)
		t.waitReady("psrc/web", "whd/crm")
		unique := map[string]bool{}
		for _, r := range s.received() {
			unique[r.Body.MessageID] = true
		}
		Eventually(func() string {
			return t.field("whd/crm", "{.status.delivery.delivered} {.status.delivery.pending} {.status.delivery.deadLettered}")
		}).Should(Equal(fmt.Sprint(len(unique), " 0 0")), "delivered, pending and dead-lettered messages in the status")
		t.eventually("whd/crm", "Delivering", "True/Delivering")
	})

	It("shares its slots among all pods, and keeps every accepted call when a pod is lost with its disk, and during a rolling update", func() {
		const slots = 6
		startNATS()
		installReplicated("--set", fmt.Sprint("replication.jetStream.slots=", slots), "--set", "dispatcher.replicas=3")
		users := startUsers("slots", 3, 5)
		shared := func(pods int) {
			GinkgoHelper()
			sharedBy(pods, slots)
		}
		shared(3)

		By("sending through each pod")
		for n := range 3 {
			for i, u := range users {
				event := fmt.Sprintf("At %d of %d", n, i)
				// The log may elect a leader, and answers 503 meanwhile.
				Eventually(sendTo).WithArguments(u.t, n, event).Should(Succeed())
				u.s.eventually(event)
			}
		}

		By("killing a pod, and deleting its disk")
		kubectl("-n", system, "delete", "pod/posthorn-dispatcher-1", "--grace-period=1", "--timeout=3m")
		ready(dispatcher)
		shared(3)

		By("restarting all dispatchers")
		kubectl("-n", system, "rollout", "restart", dispatcher)
		ready(dispatcher)
		shared(3)

		By("removing a pod, and adding it again")
		kubectl("-n", system, "scale", dispatcher, "--replicas=2")
		shared(2)
		kubectl("-n", system, "scale", dispatcher, "--replicas=3")
		shared(3)

		for _, u := range users {
			u.arrived()
			wantStatus(u.t)
		}
	})

	It("gets pods from a HorizontalPodAutoscaler while it is busy, and loses no call when they are removed", Label(long), func() {
		const slots = 6
		startNATS()
		startAdapter()
		installReplicated("--set", fmt.Sprint("replication.jetStream.slots=", slots), "--set", "dispatcher.autoscaling.enabled=true",
			"--set", "dispatcher.autoscaling.minReplicas=2", "--set", "dispatcher.autoscaling.maxReplicas=3",
			"--set", "dispatcher.autoscaling.cpu=", "--set-string", "dispatcher.autoscaling.firstAttemptAge=1")
		steady := startUsers("steady", 2, 2)
		sharedBy(2, slots)
		const autoscaler = "hpa/posthorn-dispatcher"
		pods := func() string {
			return kubectl("-n", system, "get", autoscaler, "-o", "jsonpath={.status.currentReplicas} {.status.desiredReplicas}")
		}
		Eventually(func() string {
			return kubectl("-n", system, "get", autoscaler, "-o", "jsonpath={.status.currentMetrics[*].pods.current.averageValue}")
		}, 3*time.Minute).Should(Equal("0"), "metric that the HorizontalPodAutoscaler reads")

		By("sending more than two pods should deliver")
		// All pods share the CPU with the receivers here, so messages wait less than a second, and not all the time.
		kubectl("-n", system, "patch", autoscaler, "--type=json", "-p", `[{"op": "replace", "path": "/spec/metrics/0/pods/target/averageValue", "value": "20m"}]`)
		kubectl("-n", system, "patch", autoscaler, "--type=merge", "-p", `{"spec": {"behavior": {"scaleUp": {"stabilizationWindowSeconds": 0}}}}`)
		// The senders are fast enough for the target, and slower than what the CPU of one node can deliver.
		const copies = 20
		busy := startUsers("busy", 4, 30)
		for _, u := range busy {
			u.t.serve("copies", posthornImage(), "sink", "--listen=:9000", "--output=none")
			u.t.secret("copies", "secret", "s3cret")
			for n := range copies {
				u.t.apply(fmt.Sprintf(`{apiVersion: posthorn.dev/v1beta1, kind: WebhookDestination, metadata: {name: copy-%d}, spec: {sourceRefs: [{name: web}], `+
					`signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: copies, key: secret}}]}, endpoints: [{name: primary, url: "http://copies.%s.svc.cluster.local/in"}]}}`, n, u.t.name))
			}
		}
		Eventually(pods, 5*time.Minute).Should(Equal("3 3"))
		By(kubectl("-n", system, "get", autoscaler))
		sharedBy(3, slots)

		By("ending the busy senders")
		for _, u := range busy {
			u.t.kubectl("delete", "whd", "--field-selector=metadata.name!=crm", "--wait=false")
			u.arrived()
		}
		// The chart waits ten minutes before it removes pods.
		kubectl("-n", system, "patch", autoscaler, "--type=merge", "-p", `{"spec": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}]}}}}`)
		Eventually(pods, 5*time.Minute).Should(Equal("2 2"))
		sharedBy(2, slots)
		for _, u := range steady {
			u.arrived()
		}
	})
})

// user is a namespace whose sender runs.
type user struct {
	t     namespace
	s     sink
	calls load
}

// startUsers starts a number of namespaces whose senders have a rate per second.
func startUsers(prefix string, number, rate int) (users []user) {
	GinkgoHelper()
	for n := range number {
		t, s := running(fmt.Sprint(prefix, "-", n))
		users = append(users, user{t, s, t.load(rate)})
	}
	return users
}

// arrived ends the sender, and requires that each call was delivered and is in the status once.
func (u user) arrived() {
	GinkgoHelper()
	u.calls.arrived(u.s)
	u.t.waitReady("psrc/web", "whd/crm")
	unique := map[string]bool{}
	for _, r := range u.s.received() {
		unique[r.Body.MessageID] = true
	}
	Eventually(func() string {
		return u.t.field("whd/crm", "{.status.delivery.delivered} {.status.delivery.pending} {.status.delivery.deadLettered}")
	}).Should(Equal(fmt.Sprint(len(unique), " 0 0")), "delivered, pending and dead-lettered messages in the status")
	u.t.eventually("whd/crm", "Delivering", "True/Delivering")
}

// wantStatus waits until kubectl posthorn status shows one destination: it leaves out the standbys.
func wantStatus(t namespace) {
	GinkgoHelper()
	Eventually(func() string {
		out, _ := command("", "kubectl", "posthorn", "status", "-n", t.name) // It fails while there is a problem.
		return out
	}).Should(MatchRegexp(`Destinations +1;`))
}

// sharedBy waits until a number of pods own all slots, each with a standby.
func sharedBy(pods, slots int) {
	GinkgoHelper()
	Eventually(func() (err error) {
		// It also reports problems of the servers, which do not matter here.
		out, _ := command("", "kubectl", "posthorn", "slots")
		owners, owned, copies := map[string]bool{}, map[string]bool{}, 0
		for _, line := range strings.Split(out, "\n") {
			switch f := strings.Fields(line); {
			case len(f) > 3 && f[2] == "owner":
				owners[f[1]], owned[f[0]] = true, true
			case len(f) > 3 && f[2] == "standby":
				copies++
			}
		}
		if len(owners) != pods || len(owned) != slots || copies != slots {
			return fmt.Errorf("got %d slots with an owner, %d owners and %d standbys, want %d, %d and %d:\n%s", len(owned), len(owners), copies, slots, pods, slots, out)
		}
		return nil
	}).Should(Succeed())
}

// adapter is the manifest of a server of the pods' metrics.
const adapter = `
apiVersion: v1
kind: Service
metadata: {name: adapter, namespace: test-metrics}
spec: {selector: {app: adapter}, ports: [{port: 443, targetPort: 6443}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: adapter, namespace: test-metrics}
spec:
  selector: {matchLabels: {app: adapter}}
  template:
    metadata: {labels: {app: adapter}}
    spec:
      volumes: [{name: certs, emptyDir: {}}]
      containers:
      - name: adapter
        image: %s
        args: [--secure-port=6443, --cert-dir=/certs]
        readinessProbe: {httpGet: {path: /readyz, port: 6443, scheme: HTTPS}, periodSeconds: 2}
        volumeMounts: [{name: certs, mountPath: /certs}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta2.custom.metrics.k8s.io}
spec:
  group: custom.metrics.k8s.io
  version: v1beta2
  service: {namespace: test-metrics, name: adapter}
  insecureSkipTLSVerify: true
  groupPriorityMinimum: 100
  versionPriority: 100
`

// startAdapter serves the metric that the HorizontalPodAutoscaler reads.
func startAdapter() {
	GinkgoHelper()
	By("starting the adapter of metrics")
	apply("", `{apiVersion: v1, kind: Namespace, metadata: {name: test-metrics}}`)
	kubectl("create", "clusterrolebinding", "test-metrics", "--clusterrole=cluster-admin", "--serviceaccount=test-metrics:default")
	DeferCleanup(func() {
		kubectl("delete", "apiservice/v1beta2.custom.metrics.k8s.io", "clusterrolebinding/test-metrics", "namespace/test-metrics", "--timeout=3m")
	})
	apply("", fmt.Sprintf(adapter, env("E2E_ADAPTER")))
	kubectl("-n", "test-metrics", "rollout", "status", "deployment/adapter", "--timeout=3m")
	kubectl("wait", "--for=condition=Available", "--timeout=3m", "apiservice/v1beta2.custom.metrics.k8s.io")
}
