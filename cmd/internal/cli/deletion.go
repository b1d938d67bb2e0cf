package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
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

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newDeleteUser() *cobra.Command {
	var d direct
	var manifests, namespace, name, requestID string
	var sources []string
	var suppress, wait bool
	var timeout, ttl, deadline time.Duration
	cmd := &cobra.Command{
		Use:   "delete-user USERID --manifests DIR",
		Short: "Send a user-deletion notice to all destinations (standalone)",
		Long: `Writes a DeletionRequest into the folder of manifests of a Posthorn that runs
without a cluster. Each affected Source's enabled destinations get one delete
message. In a cluster, apply a DeletionRequest instead.

With --wait it prints the outcome of each notification when all are final, and
exits 1 when one was not delivered. A request that completed is not sent again
within 30 days under the same name; to send it again, set another --request-id and
remove the file of the earlier request. With --ttl the file is removed automatically.`,
		Example: `  posthorn delete-user u1 --manifests ./webhooks --wait
  posthorn delete-user u1 --manifests ./webhooks --source web --suppress`,
		Args: command.ExactArgs("USERID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if manifests == "" {
				return command.Usagef("--manifests is missing: the folder of manifests of the running Posthorn")
			}
			if info, err := os.Stat(manifests); err != nil || !info.IsDir() {
				return command.Usagef("--manifests %q is not a folder", manifests)
			}
			if args[0] == "" {
				return command.Usagef("USERID is empty")
			}
			if cmd.Flags().Changed("ttl") && (ttl%time.Second != 0 || ttl < 10*time.Second || ttl > 365*24*time.Hour) {
				return command.Usagef("--ttl must be whole seconds, from 10s to a year")
			}
			if deadline%time.Second != 0 || deadline < 0 || deadline > 365*24*time.Hour {
				return command.Usagef("--deadline must be whole seconds, at most a year")
			}
			if suppress && ttl > 0 {
				return command.Usagef("--ttl has no effect with --suppress: suppression lasts until the file is removed")
			}
			spec := v1alpha1.DeletionRequestSpec{UserID: args[0], Suppress: suppress}
			spec.RequestID = requestID
			for _, source := range sources {
				spec.SourceRefs = append(spec.SourceRefs, v1alpha1.ObjectReference{Name: source})
			}
			if deadline > 0 {
				spec.ActiveDeadlineSeconds = ptr.To(int64(deadline / time.Second))
			}
			if ttl > 0 {
				spec.TTLSecondsAfterFinished = ptr.To(int32(ttl / time.Second))
			}
			if name == "" {
				sum := sha256.Sum256([]byte(args[0]))
				name = "delete-" + hex.EncodeToString(sum[:6])
			}
			text, err := yaml.Marshal(map[string]any{
				"apiVersion": v1alpha1.GroupVersion.String(), "kind": "DeletionRequest",
				"metadata": map[string]string{"name": name, "namespace": namespace},
				"spec":     spec,
			})
			if err != nil {
				return err
			}
			path := filepath.Join(manifests, "deletionrequest-"+namespace+"-"+name+".yaml")
			if err := writeNew(path, text); errors.Is(err, os.ErrExist) {
				return fmt.Errorf("%s exists: this user's deletion is already requested; see 'posthorn get deletions %s', or remove the file to repeat the request", path, name)
			} else if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "requested: %s\n", path)
			if !wait {
				return nil
			}
			return d.awaitDeletion(cmd, namespace, name, timeout)
		},
	}
	f := cmd.Flags()
	f.StringVar(&manifests, "manifests", "", "the folder of manifests of the running Posthorn")
	f.StringVarP(&namespace, "namespace", "n", "default", "namespace of the request")
	f.StringVar(&name, "name", "", "name of the request (default: made of the user's id)")
	f.StringSliceVar(&sources, "source", nil, "an affected Source; may be repeated (default: all Sources of the namespace)")
	f.StringVar(&requestID, "request-id", "", "name of this run; set another one to send a completed request again")
	f.BoolVar(&suppress, "suppress", false, "reject later calls of this user as long as the request exists")
	f.DurationVar(&deadline, "deadline", 0, "end the run as failed after this time (default: no deadline)")
	f.DurationVar(&ttl, "ttl", 0, "remove the request this long after it finished (default: keep it)")
	f.BoolVar(&wait, "wait", false, "wait until every notification has its final state")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "maximum wait")
	d.adminFlag(cmd)
	return cmd
}

// writeNew writes a file atomically, unless a file of that name exists.
func writeNew(path string, text []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".deletionrequest-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(text)
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Link(tmp.Name(), path)
}

// awaitDeletion waits for the end of a request and prints it.
func (d *direct) awaitDeletion(cmd *cobra.Command, namespace, name string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	path := apiPrefix + "/namespaces/" + url.PathEscape(namespace) + "/deletionrequests/" + url.PathEscape(name)
	for {
		var last error
		body, err := d.resource(cmd, path, "application/json")
		if err == nil {
			var o v1alpha1.DeletionRequest
			if err := json.Unmarshal(body, &o); err != nil {
				return err
			}
			accepted := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAccepted)
			if accepted != nil && accepted.Status == metav1.ConditionFalse {
				return fmt.Errorf("not accepted: %s", accepted.Message)
			}
			ready := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionReady)
			if v1alpha1.JobEnded(o.Status.JobStatus) {
				for _, n := range o.Status.Notifications {
					fmt.Fprintln(cmd.OutOrStdout(), strings.TrimSpace(fmt.Sprintf("%s to %s: %s %s", n.Source, n.Destination, n.State, n.Reason)))
				}
				fmt.Fprintln(cmd.OutOrStdout(), ready.Message)
				if meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionFailed) {
					return command.ErrFailed
				}
				return nil
			}
			last = errors.New("no status yet")
			if ready != nil {
				last = errors.New(ready.Message)
			}
		} else {
			last = err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not finished after %s: %w", timeout, last)
		}
		select {
		case <-cmd.Context().Done():
			return cmd.Context().Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}
