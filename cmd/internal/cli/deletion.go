package cli

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/internal/durable"
)

func newDeleteUser() *cobra.Command {
	var d direct
	var o deletionOptions
	var wait bool
	var ttl string
	var timeout time.Duration
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "delete-user USERID -f DIR",
		Short: "Send a user-deletion notice to all destinations (standalone)",
		Long: `Writes a DeletionRequest into the folder of manifests of a Posthorn that runs
without a cluster. Each affected Source's destinations get one delete
message. In a cluster, apply a DeletionRequest instead.

With --wait it prints the outcome of each notification when all are final, and
exits 1 when one was not delivered. A request that completed is not sent again
within 30 days under the same name; to send it again, set another --request-id and
remove the file of the earlier request. With --ttl the file is removed automatically.`,
		Example: `  posthorn delete-user u1 -f ./webhooks --wait
  posthorn delete-user u1 -f ./webhooks --source web --suppress`,
		Args: command.ExactArgs("USERID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.userID = args[0]
			if err := o.validate(); err != nil {
				return err
			}
			var err error
			if o.ttl, err = ttlSeconds(ttl, wait); err != nil {
				return err
			}
			if o.suppress && o.ttl != nil {
				return command.Usagef("--ttl has no effect with --suppress: suppression lasts until the file is removed")
			}
			if o.name == "" {
				sum := sha256.Sum256([]byte(o.userID))
				o.name = "delete-" + hex.EncodeToString(sum[:6])
			}
			path, err := o.write()
			if err != nil {
				return err
			}
			requested := cmd.OutOrStdout()
			if objects.Chosen() {
				requested = cmd.ErrOrStderr() // Standard output has the object alone.
			}
			fmt.Fprintf(requested, "requested: %s\n", path)
			if !wait {
				return nil
			}
			return d.awaitDeletion(cmd, objects, o.namespace, o.name, timeout)
		},
	}
	f := cmd.Flags()
	command.ManifestsFlag(cmd, &o.manifests, "folder of manifests of the running Posthorn")
	command.NamespaceFlag(cmd, &o.namespace)
	f.StringVar(&o.name, "name", "", "name of the request (default: made of the user's id)")
	f.StringSliceVar(&o.sources, "source", nil, "an affected Source; may be repeated (default: all Sources of the namespace)")
	f.StringVar(&o.requestID, "request-id", "", "name of this run; set another one to send a completed request again")
	f.BoolVar(&o.suppress, "suppress", false, "reject later calls of this user as long as the request exists")
	f.DurationVar(&o.deadline, "deadline", 0, "end the run as failed after this time (default: no deadline)")
	f.StringVar(&ttl, "ttl", never, "remove the request this long after it finished; 0s: at once, never: keep it")
	objects = command.ObjectsFlag(cmd)
	f.BoolVar(&wait, "wait", false, "wait until every notification has its final state")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "maximum wait")
	command.AdminFlag(cmd, &d.admin)
	return cmd
}

// deletionOptions describe a DeletionRequest in a folder of manifests.
type deletionOptions struct {
	manifests, namespace, name, userID, requestID string
	// sources are the affected Sources; none means all.
	sources  []string
	suppress bool
	// deadline is 0 if it is not set.
	deadline time.Duration
	ttl      *int32
}

func (o deletionOptions) validate() error {
	const year = 365 * 24 * time.Hour
	if err := command.CheckManifests(o.manifests); err != nil {
		return err
	}
	if o.userID == "" {
		return command.Usagef("USERID is empty")
	}
	if o.deadline%time.Second != 0 || o.deadline < 0 || o.deadline > year {
		return command.Usagef("--deadline must be whole seconds, at most a year")
	}
	return nil
}

func (o deletionOptions) spec() v1beta1.DeletionRequestSpec {
	spec := v1beta1.DeletionRequestSpec{UserID: o.userID, Suppress: o.suppress}
	spec.RequestID = o.requestID
	for _, source := range o.sources {
		spec.SourceRefs = append(spec.SourceRefs, v1beta1.ObjectReference{Name: source})
	}
	if o.deadline > 0 {
		spec.ActiveDeadlineSeconds = ptr.To(int64(o.deadline / time.Second))
	}
	spec.TTLSecondsAfterFinished = o.ttl
	return spec
}

// write writes the manifest into the folder and returns its path.
func (o deletionOptions) write() (path string, err error) {
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": v1beta1.GroupVersion.String(), "kind": "DeletionRequest",
		"metadata": map[string]string{"name": o.name, "namespace": o.namespace},
		"spec":     o.spec(),
	})
	if err != nil {
		return "", err
	}
	path = filepath.Join(o.manifests, "deletionrequest-"+o.namespace+"-"+o.name+".yaml")
	err = durable.Create(path, text, 0o600)
	if errors.Is(err, os.ErrExist) {
		err = fmt.Errorf("%s exists: this user's deletion is already requested; see 'posthorn get deletions %s', or remove the file to repeat the request", path, o.name)
	}
	return path, err
}

// awaitDeletion waits for the end of a request and prints it.
func (d *direct) awaitDeletion(cmd *cobra.Command, objects *command.Objects, namespace, name string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	path := apiPrefix + "/namespaces/" + url.PathEscape(namespace) + "/deletionrequests/" + url.PathEscape(name)
	for {
		var o v1beta1.DeletionRequest
		body, err := d.resource(cmd, path, "application/json")
		if err == nil {
			err = json.Unmarshal(body, &o)
		}
		for _, conditionType := range []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs} {
			if c := meta.FindStatusCondition(o.Status.Conditions, conditionType); c != nil && c.Status == metav1.ConditionFalse {
				return fmt.Errorf("not accepted: %s", c.Message)
			}
		}
		ready := cmp.Or(meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady), &metav1.Condition{Message: "no status yet"})
		switch {
		case v1beta1.JobEnded(o.Status.JobStatus):
			return printDeletion(cmd.OutOrStdout(), objects, &o, ready.Message)
		case time.Now().After(deadline):
			return fmt.Errorf("not finished after %s: %w", timeout, cmp.Or(err, errors.New(ready.Message)))
		}
		select {
		case <-cmd.Context().Done():
			return command.Interrupted(fmt.Errorf("the request %s continues; see 'posthorn get deletions %s'", name, name))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// printDeletion prints the outcome of each notification and of the request, and fails if the request
// failed.
func printDeletion(w io.Writer, objects *command.Objects, o *v1beta1.DeletionRequest, message string) error {
	s := o.Status
	if objects.Chosen() {
		if err := objects.Print(w, o); err != nil {
			return err
		}
		return failedRun(s.Conditions)
	}
	for _, n := range s.Notifications {
		fmt.Fprintln(w, strings.TrimSpace(fmt.Sprintf("%s to %s: %s %s", n.Source, n.Destination, n.State, n.Reason)))
	}
	fmt.Fprintln(w, message)
	return failedRun(s.Conditions)
}

// failedRun fails if a run failed.
func failedRun(conditions []metav1.Condition) error {
	if meta.IsStatusConditionTrue(conditions, v1beta1.ConditionFailed) {
		return command.ErrFailed
	}
	return nil
}
