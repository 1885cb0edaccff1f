/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlsym and dlvsym. vgpu_decide(handle, name, version or NULL, caller) returns two registers: the function, and whether
 * it is the result. If it is not, control passes to the real function by a jump, so that it sees the true caller.
 */
    .section .note.GNU-stack, "", %progbits
    .text
    .hidden vgpu_real_dlsym
    .hidden vgpu_real_dlvsym
    .hidden vgpu_decide
    .hidden vgpu_dlsym_entry

#if defined(__x86_64__)

    .globl dlsym
    .globl vgpu_dlsym_entry
    .type dlsym, @function
    .type vgpu_dlsym_entry, @function
dlsym:
vgpu_dlsym_entry:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    xorl %edx, %edx
    movq 24(%rsp), %rcx
    call vgpu_decide
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rdx, %rdx
    jz 1f
    ret
1:  jmpq *vgpu_real_dlsym(%rip)
    .cfi_endproc
    .size dlsym, . - dlsym

    .globl dlvsym
    .type dlvsym, @function
dlvsym:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    pushq %rdx
    .cfi_adjust_cfa_offset 8
    movq 24(%rsp), %rcx
    call vgpu_decide
    movq %rdx, %rcx
    popq %rdx
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rcx, %rcx
    jz 1f
    ret
1:  jmpq *vgpu_real_dlvsym(%rip)
    .cfi_endproc
    .size dlvsym, . - dlvsym

#elif defined(__aarch64__)

    .macro body
    .cfi_startproc
    hint #34 /* bti c */
    stp x29, x30, [sp, #-48]!
    .cfi_def_cfa_offset 48
    .cfi_offset 29, -48
    .cfi_offset 30, -40
    mov x29, sp
    stp x0, x1, [sp, #16]
    str x2, [sp, #32]
    mov x3, x30
    .endm

    .macro finish real
    bl vgpu_decide
    mov x9, x0
    mov x10, x1
    ldp x0, x1, [sp, #16]
    ldr x2, [sp, #32]
    ldp x29, x30, [sp], #48
    .cfi_restore 29
    .cfi_restore 30
    .cfi_def_cfa_offset 0
    cbz x10, 1f
    mov x0, x9
    ret
1:  adrp x9, \real
    ldr x9, [x9, #:lo12:\real]
    br x9
    .cfi_endproc
    .endm

    .globl vgpu_dlsym_entry
    .type vgpu_dlsym_entry, %function
    .globl dlsym
    .type dlsym, %function
vgpu_dlsym_entry:
dlsym:
    body
    mov x2, xzr
    finish vgpu_real_dlsym
    .size dlsym, . - dlsym

    .globl dlvsym
    .type dlvsym, %function
dlvsym:
    body
    finish vgpu_real_dlvsym
    .size dlvsym, . - dlvsym

#else
#error "route_entry.S knows x86-64 and aarch64 only"
#endif
