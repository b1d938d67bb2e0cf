package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
)

// newKubectl makes the commands of `kubectl posthorn`.
func newKubectl(use string) *cobra.Command {
	cluster := &clusterConnector{}
	cmd := &cobra.Command{
		Use:   use,
		Short: "Inspect Posthorn in a cluster, also as 'kubectl posthorn'",
		Long: `Inspects Posthorn in a cluster, and sends calls to it, with your own permissions.
Install it as a plugin:
  ln -s "$(command -v posthorn)" /usr/local/bin/kubectl-posthorn

redeliver, and why without live numbers, need permissions in your own namespace
only (ClusterRoles view and edit). The others connect to the
dispatcher pods and need the Role posthorn-support-user in the namespace of
Posthorn's release.`,
		RunE: command.ShowHelp,
	}
	cluster.register(cmd)
	flags := func(*cobra.Command) connector { return cluster }
	Add(cmd, GroupBasic, newKubectlStatus(cluster), newKubectlPage(cluster), newSend(cluster.call), newTest(flags), newImport(cluster.call),
		newAudience(cluster.call), newKubectlRedeliver(cluster))
	Add(cmd, GroupDebug, newKubectlWhy(cluster), newAttempts(flags), newTail(flags), newTrace(flags), newDeadLetters(flags), newSlots(flags),
		newDebug(flags))
	Add(cmd, GroupOther, newVersion())
	SetGroups(cmd, insteadPlugin)
	ofPlugin(cmd)
	return cmd
}

// ofPlugin rewrites the examples of all commands below for the plugin.
func ofPlugin(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		c.Example = regexp.MustCompile(`(?m)(^ *|\| )posthorn `).ReplaceAllString(c.Example, "${1}kubectl posthorn ")
		c.Example = strings.ReplaceAll(c.Example, " --write-key demo", "")
		ofPlugin(c)
	}
}

const whyLong = `Explains why messages do not arrive at a destination: problems of its spec, its
Secrets, its Sources, its filter or its endpoints, and the backlog. Without a name
it prints the first problem of every object that has one, of all kinds; with a kind
alone, such as sources, all objects of the kind. Exits 1 if there is a problem.`

func newWhy() *cobra.Command {
	var d direct
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:     "why [DESTINATION|KIND|KIND/NAME]",
		Short:   "Diagnose a destination (standalone)",
		Long:    whyLong,
		Example: "  posthorn why\n  posthorn why -A\n  posthorn why crm\n  posthorn why source/web\n  posthorn why deletions",
		Args:    command.AtMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			resource, name, err := explained(args)
			if err == nil {
				err = command.CheckAllNamespaces(cmd, d.all, name)
			}
			if err != nil {
				return err
			}
			if resource != "webhookdestinations" || name == "" {
				v, err := d.inventory(cmd.Context(), d.scope())
				if err != nil {
					return err
				}
				return v.explain(cmd, objects, d.scope(), resource, name)
			}
			facts, err := d.facts(cmd.Context(), name)
			if err != nil {
				return err
			}
			return printFindings(cmd.OutOrStdout(), objects, trouble{Kind: "WebhookDestination", Namespace: facts.Namespace, Name: facts.Name},
				why.Explain(facts))
		},
	}
	command.AdminFlag(cmd, &d.admin)
	cmd.ValidArgsFunction = completeObject(func() connector { return &d })
	command.ColorFlag(cmd)
	d.scopeFlags(cmd)
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// facts reads the input of why for a destination.
func (d *direct) facts(ctx context.Context, destination string) (why.Facts, error) {
	facts := why.Facts{Namespace: d.ns, Name: destination, Now: time.Now()}
	var sources v1beta1.SourceList
	var destinations v1beta1.WebhookDestinationList
	var problems manifest.Problems
	prefix := apiPrefix + "/namespaces/" + url.PathEscape(d.ns)
	for path, into := range map[string]any{prefix + "/sources": &sources, prefix + "/webhookdestinations": &destinations,
		"/problems": &problems} {
		if err := d.read(ctx, path, into); err != nil {
			return facts, err
		}
	}
	t, err := d.target()
	if err != nil {
		return facts, err
	}
	facts.Sources, facts.Destinations, facts.Manifests = sources.Items, destinations.Items, problems.Problems
	return facts, addLive(ctx, &facts, []target{t})
}

// addLive adds the live state of dispatchers to the input of why: of all, or after an error of none.
func addLive(ctx context.Context, facts *why.Facts, targets []target) error {
	read, err := readLive(ctx, targets)
	if err != nil {
		return err
	}
	var attempts []adminapi.Attempt
	for _, t := range targets {
		for a, err := range t.Attempts(ctx, facts.Namespace+"/"+facts.Name, "") {
			if err != nil {
				return t.explain(err)
			}
			attempts = append(attempts, a)
		}
	}
	facts.Reports, facts.UnknownKeys, facts.Attempts = read.reports, read.unknownKeys, attempts
	return nil
}

// liveState is the state of dispatchers.
type liveState struct {
	reports     []*podreport.Index
	unknownKeys []adminapi.UnknownKey
}

// readLive reads the state of dispatchers.
func readLive(ctx context.Context, targets []target) (l liveState, err error) {
	for _, t := range targets {
		report, err := t.Report(ctx, "")
		if err != nil {
			return l, t.explain(err)
		}
		l.reports = append(l.reports, podreport.NewIndex(*report))
		for k, err := range t.UnknownKeys(ctx) {
			if err != nil {
				return l, t.explain(err)
			}
			l.unknownKeys = append(l.unknownKeys, k)
		}
	}
	return l, nil
}

// liveTimeout bounds the requests for live numbers, so that a dispatcher that hangs does not delay why.
const liveTimeout = 20 * time.Second

// addLive calls add with the dispatchers that can have messages. Unless live numbers are required by
// the flag --live, it replaces an error by a notice: the stored status is shown then.
func (c *clusterConnector) addLive(cmd *cobra.Command, add func(context.Context, []target) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), liveTimeout)
	defer cancel()
	err := c.live(ctx, add)
	if err == nil || cmd.Flags().Changed("live") || cmd.Context().Err() != nil {
		return err
	}
	w := cmd.ErrOrStderr()
	fmt.Fprintln(w, command.Paint(w, command.Yellow, "Notice:"), c.withoutLive(err))
	return nil
}

// withoutLive describes in one line why the stored status is shown, and the fix.
func (c *clusterConnector) withoutLive(err error) string {
	reason, _, _ := strings.Cut(err.Error(), "\n")
	fix := "check the dispatcher pods in namespace " + c.system
	switch {
	case apierrors.IsForbidden(err):
		fix = fmt.Sprintf("bind the Role %s-user in namespace %s to this user", c.account, c.system)
	case errors.Is(err, context.DeadlineExceeded):
		reason = fmt.Sprintf("no answer within %s: %s", liveTimeout, reason)
	}
	return fmt.Sprintf("the numbers are from the stored status, which can be minutes old: %s. To do: %s; --live=false omits this request.", strings.TrimSuffix(reason, "."), fix)
}

// live calls f with the dispatchers that can have messages.
func (c *clusterConnector) live(ctx context.Context, f func(context.Context, []target) error) error {
	targets, closeAll, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer closeAll()
	return f(ctx, targets)
}

func newKubectlWhy(cluster *clusterConnector) *cobra.Command {
	var objects *command.Objects
	var live, all bool
	cmd := &cobra.Command{
		Use:     "why [DESTINATION|KIND|KIND/NAME]",
		Short:   "Diagnose a destination",
		Long:    whyLong,
		Example: "  kubectl posthorn why -n shop\n  kubectl posthorn why crm -n shop\n  kubectl posthorn why source/web -n shop\n  kubectl posthorn why deletions -n shop",
		Args:    command.AtMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			resource, name, err := explained(args)
			if err == nil {
				err = command.CheckAllNamespaces(cmd, all, name)
			}
			if err != nil {
				return err
			}
			if resource != "webhookdestinations" || name == "" {
				v, namespace, err := cluster.inventory(cmd.Context(), all)
				if err == nil && live {
					err = cluster.addLive(cmd, v.addLive)
				}
				if err != nil {
					return err
				}
				return v.explain(cmd, objects, namespace, resource, name)
			}
			posthorn, err := cluster.resources()
			if err != nil {
				return err
			}
			var sources v1beta1.SourceList
			var destinations v1beta1.WebhookDestinationList
			facts := why.Facts{Namespace: posthorn.namespace, Name: name, Now: time.Now(), OperatorRenewed: cluster.operatorRenewed(cmd.Context())}
			for resource, into := range map[string]runtime.Object{"webhookdestinations": &destinations, "sources": &sources} {
				err := posthorn.list(cmd.Context(), resource, into)
				if notServed(err) && len(facts.KindsGone) == 0 {
					facts.KindsGone, err = append(facts.KindsGone, kindOf(resource)), nil
				}
				if err != nil {
					return err
				}
			}
			facts.Sources, facts.Destinations = sources.Items, destinations.Items
			if live {
				err := cluster.addLive(cmd, func(ctx context.Context, targets []target) error { return addLive(ctx, &facts, targets) })
				if err != nil {
					return err
				}
			}
			return printFindings(cmd.OutOrStdout(), objects, trouble{Kind: "WebhookDestination", Namespace: facts.Namespace, Name: facts.Name},
				why.Explain(facts))
		},
	}
	cmd.ValidArgsFunction = completeObject(func() connector { return cluster })
	command.ColorFlag(cmd)
	command.AllNamespacesFlag(cmd, &all)
	cmd.Flags().BoolVar(&live, "live", true, "query the dispatcher pods, which needs the Role posthorn-support-user; unless set, the stored status is shown if that fails")
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// printFindings prints the findings about an object, the cause first.
func printFindings(w io.Writer, objects *command.Objects, of trouble, findings []why.Finding) error {
	cause := why.Cause(findings)
	object := of.Namespace + "/" + of.Name
	if of.Kind != "WebhookDestination" {
		object = of.Kind + " " + object
	}
	object = strings.Trim(fmt.Sprintf("%+q", object), `"`) // The name is an argument: any bytes.
	if objects.Chosen() {
		for _, f := range findings {
			of.Finding = f
			if err := objects.Print(w, of); err != nil {
				return err
			}
		}
	} else {
		if cause == nil {
			fmt.Fprintf(w, "%s: no problem found.\n\n", object)
		} else {
			fmt.Fprintf(w, "%s: %s\n", object, sentence(cause.Text))
			if since := sinceLine(*cause, time.Now()); since != "" {
				fmt.Fprintln(w, since)
			}
			if cause.Fix != "" {
				fmt.Fprintf(w, "To do: %s\n", sentence(cause.Fix))
			}
			fmt.Fprintln(w)
		}
		table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		for _, f := range findings {
			fmt.Fprintf(table, "%s\t%s\t%s\n", command.Paint(w, colorOf(f.Level), string(f.Level)), f.About, f.Text)
			if f.Fix != "" && (cause == nil || f != *cause) {
				fmt.Fprintf(table, "%s\t\t-> %s\n", command.Paint(w, command.Plain, ""), f.Fix)
			}
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	if cause != nil {
		return command.ErrFailed
	}
	return nil
}

// sinceLine is the time since when an endpoint fails; "" for another finding.
func sinceLine(f why.Finding, now time.Time) string {
	if f.About != "Endpoint" || f.Since.IsZero() {
		return ""
	}
	return fmt.Sprintf("Since: %s (%s)", f.Since.UTC().Format(time.RFC3339), now.Sub(f.Since).Round(time.Second))
}

func colorOf(level why.Level) command.Color {
	switch level {
	case why.Problem:
		return command.Red
	case why.Notice:
		return command.Yellow
	case why.Fine:
		return command.Green
	}
	return command.Plain
}

// sentence ends a text with a full stop, unless it already ends a sentence.
func sentence(text string) string {
	if strings.HasSuffix(text, ".") || strings.HasSuffix(text, "?") {
		return text
	}
	return text + "."
}

func newKubectlRedeliver(cluster *clusterConnector) *cobra.Command {
	var chosen selection
	var wait bool
	var ttl string
	var objects *command.Objects
	o := &v1beta1.Redelivery{}
	cmd := &cobra.Command{
		Use:   "redeliver DESTINATION",
		Short: "Send a destination's dead letters again",
		Long: `Creates a Redelivery, which runs in all dispatcher pods, and waits for its end.
Ctrl-C ends the wait, not the Redelivery; delete the object to stop it.

Use it rather than 'deadletters redeliver': it needs only the permission to edit the
namespace, continues after a restart of a pod, and leaves a record. 'deadletters
redeliver' is for administrators: it takes keys, runs at once while the command
runs, and needs no object.

Redelivered means pending again. The other destinations of the Source do not get
these messages, but count them as pending until their lanes have read them.`,
		Example: "  kubectl posthorn redeliver crm --reason Rejected --since 2h --dry-run\n  kubectl posthorn redeliver crm --all",
		Args:    command.ExactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := chosen.parse("with"); err != nil {
				return err
			}
			var err error
			if o.Spec.TTLSecondsAfterFinished, err = ttlSeconds(ttl, wait); err != nil {
				return err
			}
			name, err := destinationArg(args[0])
			if err != nil {
				return err
			}
			posthorn, err := cluster.resources()
			if err != nil {
				return err
			}
			o.Namespace, o.GenerateName = posthorn.namespace, name+"-"
			o.Spec.DestinationRef.Name, o.Spec.Match = name, matchOf(chosen)
			if err := posthorn.create(cmd.Context(), "redeliveries", o); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "redelivery.posthorn.dev/%s created\n", o.Name)
			if !wait && objects.Chosen() {
				return objects.Print(cmd.OutOrStdout(), o)
			} else if !wait {
				return nil
			}
			return awaitRedelivery(cmd, objects, posthorn, o)
		},
	}
	chosen.register(cmd)
	f := cmd.Flags()
	f.BoolVar(&o.Spec.DryRun, "dry-run", false, "only count")
	f.Int32Var(&o.Spec.DeadLettersPerSecond, "rate", adminapi.DefaultRate, "dead letters per second, over all dispatchers")
	f.StringVar(&ttl, "ttl", "1h", "delete the Redelivery this long after it finished; 0s: at once, never: keep it")
	f.BoolVar(&wait, "wait", true, "wait for the end")
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// matchOf returns the match of a Redelivery; nil selects all dead letters.
func matchOf(chosen selection) *v1beta1.DeadLetterMatch {
	if chosen.all {
		return nil
	}
	s := &v1beta1.DeadLetterMatch{Reasons: chosen.Reasons, Events: chosen.Events, Since: optional(chosen.Since),
		Until: optional(chosen.Until)}
	for _, code := range chosen.StatusCodes {
		if code == 0 {
			s.NoResponse = true
		} else {
			s.StatusCodes = append(s.StatusCodes, int32(code)) //nolint:gosec // selection.parse bounds it.
		}
	}
	for _, t := range chosen.Types {
		s.Types = append(s.Types, v1beta1.MessageType(t))
	}
	return s
}

// awaitRedelivery waits for the end of a Redelivery. It prints each new message of the condition
// Ready, and fails if the Redelivery failed.
func awaitRedelivery(cmd *cobra.Command, objects *command.Objects, posthorn *resources, o *v1beta1.Redelivery) error {
	message := func() string {
		if ready := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady); ready != nil {
			return ready.Message
		}
		return ""
	}
	for before := ""; !v1beta1.JobEnded(o.Status.JobStatus); {
		select {
		case <-cmd.Context().Done():
			return command.Interrupted(fmt.Errorf("the Redelivery continues; see kubectl -n %s get redelivery %s", o.Namespace, o.Name))
		case <-time.After(500 * time.Millisecond):
		}
		if err := posthorn.get(cmd.Context(), "redeliveries", o.Name, o); err != nil && cmd.Context().Err() == nil {
			return err
		}
		if now := message(); now != before && !v1beta1.JobEnded(o.Status.JobStatus) {
			fmt.Fprintln(cmd.ErrOrStderr(), now)
			before = now
		}
	}
	if objects.Chosen() {
		if err := objects.Print(cmd.OutOrStdout(), o); err != nil {
			return err
		}
	} else {
		fmt.Fprintln(cmd.OutOrStdout(), message())
	}
	return failedRun(o.Status.Conditions)
}

// optional is nil for the zero time.
func optional(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	return &metav1.Time{Time: t}
}
