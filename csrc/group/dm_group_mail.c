/* Messages of a group: see dm_group.h and backend/mail/dm_mail.h.
 *
 * They take no turn: a message is given to the group's mail, which is opened with the
 * first of them, and its work ends when the mail says so. A message that fails breaks the
 * group as an operation that fails half way does.
 */
#include <string.h>

#include "backend/gloo/dm_netif.h"
#include "backend/mail/dm_mail.h"
#include "group/dm_private.h"

bool
dm_group_mails(const dm_group *group, const dm_op *op)
{
    return (op->kind == DM_OP_SEND || op->kind == DM_OP_RECV) &&
           (group->backend->flags & DM_BACKEND_MAIL) != 0;
}

/* What a thread that opens the mail waits like: the group can end it. */
static dm_status
poll_group(void *arg, dm_error *err)
{
    dm_group *group = arg;
    pthread_mutex_lock(&group->lock);
    dm_status status = dm_group_admit_locked(group, err);
    pthread_mutex_unlock(&group->lock);
    return status;
}

static dm_status
open_mail(dm_group *group, dm_mail **mail, dm_error *err)
{
    dm_netif netif;
    dm_wait wait = {dm_clock_deadline(dm_group_timeout(group)), poll_group, group};
    DM_TRY(dm_netif_from_environment(&netif, err));
    return dm_mail_open(&group->config, netif.text, &wait, mail, err);
}

/* The mail, which is opened if need be: by one thread, others wait for it. */
static dm_status
get_mail_locked(dm_group *group, dm_error *err)
{
    dm_wait forever = DM_WAIT_FOREVER;
    for (;;) {
        DM_TRY(dm_group_admit_locked(group, err));
        if (group->mail != NULL) {
            return DM_OK;
        }
        if (!group->opening_mail) {
            break;
        }
        dm_group_wait_changed_locked(group, &forever);
    }
    group->opening_mail = true;
    pthread_mutex_unlock(&group->lock);
    dm_mail *mail = NULL;
    dm_status status = open_mail(group, &mail, err);
    pthread_mutex_lock(&group->lock);
    group->opening_mail = false;
    group->mail = mail;
    pthread_cond_broadcast(&group->changed);
    return status == DM_OK ? dm_group_admit_locked(group, err) : status;
}

dm_status
dm_group_post(dm_group *group, dm_op *op, dm_mail_item *item, dm_error *err)
{
    pthread_mutex_lock(&group->lock);
    dm_status status = get_mail_locked(group, err);
    dm_mail *mail = group->mail;
    if (status == DM_OK) {
        op->seq = ++group->messages;
    }
    pthread_mutex_unlock(&group->lock);
    DM_TRY(status);
    item->op = op;
    return dm_mail_post(mail, item, err);
}

void
dm_group_stop_mail(dm_group *group, dm_status why, const char *text,
                   const dm_error *tell)
{
    pthread_mutex_lock(&group->lock);
    dm_mail *mail = group->mail;
    pthread_mutex_unlock(&group->lock);
    if (mail != NULL) {
        dm_mail_stop(mail, why, text, tell);
    }
}
